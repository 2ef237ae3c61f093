"""checkpoint: recompute a module's activations in backward."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import is_grad_enabled
from torch.utils.checkpoint import checkpoint

from slapo_zoo.directive import Directive, Site, primitive
from slapo_zoo.rng import RandomStream


@primitive("checkpoint")
@dataclass(frozen=True)
class Checkpoint(Directive):
    """Keep only the inputs of a module, and run its forward again in backward.

    rewrite:  y = f(x)  -->  y = checkpoint(f, x)
    note:     the recomputation draws the same dropout masks; a live KV cache would double
    source:   Chen et al. 2016, arXiv:1604.06174
    """

    def check(self, site: Site) -> None:
        if site.path in site.state.checkpointed:
            raise self.fail(site, "this module is checkpointed already", "remove one of the two")

    def apply(self, site: Site) -> None:
        site.state.checkpointed.append(site.path)
        forward, stream = site.module.forward, site.state.random

        @wraps(forward)
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not (site.module.training and is_grad_enabled()):
                return forward(*args, **kwargs)
            contexts = restoring(stream)
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs
            )

        site.module.forward = recomputed


def restoring(stream: RandomStream) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for the first run and the recomputation, which draws at the first one's position."""
    return nullcontext(), stream.at(*stream.position())
