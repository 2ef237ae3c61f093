"""checkpoint: recompute the activations of a module, or of some nodes, in backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint as recompute
from torch import is_grad_enabled, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from slapo_zoo.language.directive import Directive, Site, join, primitive
from slapo_zoo.language.graph.group import group
from slapo_zoo.language.graph.rewrite import insertion_point
from slapo_zoo.language.graph.target import LIVE, resolve
from slapo_zoo.parallel.random_stream import RandomStream

ATEN = torch.ops.aten
# What a policy keeps; all else is recomputed.
POLICIES: dict[str, set[Any]] = {
    "save_matmuls": {
        ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.baddbmm.default,
        ATEN._scaled_dot_product_flash_attention.default,
        ATEN._scaled_dot_product_efficient_attention.default,
        ATEN._scaled_dot_product_cudnn_attention.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        "slapo_zoo.linear.default", "slapo_zoo.short_attention.default",
    },
}  # fmt: skip


@primitive("checkpoint")
@dataclass(frozen=True)
class Checkpoint(Directive):
    """Keep only the inputs of a module, and run its forward again in backward.

    rewrite:  y = f(x)               -->  y = checkpoint(f, x)
              t = f(a); y = g(t, b)  -->  y = checkpoint(self.Checkpoint_0, a, b)   (a subgraph)
    note:     the recomputation draws the same dropout masks; a live KV cache would double
    errors:   checkpointed already; an unknown policy; a subgraph that is not there
    source:   Chen et al. 2016, arXiv:1604.06174

    Args:
        subgraph: of a traced module: what `find` returned or a pattern (local only), or a regex
            over the modules that the graph calls.
        policy: "" keeps nothing inside; "save_matmuls" keeps the results of matrix products and
            of fused attention, so that only cheap operations run again.
        offload: what is kept for backward waits in the memory of the host.
    """

    subgraph: Any = None
    policy: str = ""
    offload: bool = False

    def local(self) -> str:
        if self.subgraph is not None and not isinstance(self.subgraph, str):
            return f"subgraph {LIVE}"
        return ""

    def check(self, site: Site) -> None:
        if self.policy and self.policy not in POLICIES:
            problem = f"found policy {self.policy!r}, expected one of {sorted(POLICIES)}"
            raise self.fail(site, problem, "leave it out to recompute everything")
        if self.subgraph is not None:
            for subgraph in resolve(site, self, self.subgraph):
                insertion_point(subgraph)
        elif site.path in site.state.checkpointed:
            raise self.fail(site, "this module is checkpointed already", "remove one of the two")

    def apply(self, site: Site) -> None:
        if self.subgraph is None:
            self._wrap(site.module, site.path, site)
            return
        for subgraph in resolve(site, self, self.subgraph):
            name, child = group(subgraph, "Checkpoint")
            self._wrap(child, join(subgraph.path, name), site)
        site.state.index()

    def _wrap(self, module: nn.Module, path: str, site: Site) -> None:
        site.state.checkpointed.append(path)
        forward, stream = module.forward, site.state.random

        @wraps(forward)
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and is_grad_enabled()):
                return forward(*args, **kwargs)
            contexts = restoring(stream, POLICIES.get(self.policy))
            with save_on_cpu() if self.offload else nullcontext():
                return recompute.checkpoint(
                    forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs
                )

        module.forward = recomputed


def restoring(
    stream: RandomStream, kept: set[Any] | None = None
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for the first run and the recomputation, which draws at the first one's position.

    Args:
        stream: of the model.
        kept: operations whose results are kept instead of recomputed.
    """
    again = stream.at(*stream.position())
    if kept is None:
        return nullcontext(), again

    def choose(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operation in kept or str(operation) in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(choose)
    return first, _both(second, again)


@contextmanager
def _both(*contexts: AbstractContextManager):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    stream: RandomStream | None = None,
    **kwargs: Any,
) -> Any:
    """Checkpoint a model or part of it, as torch.utils.checkpoint.checkpoint does.

    The recomputation also draws from a schedule's own random stream at the same position.

    Args:
        function: what is recomputed.
        *args: of the function.
        use_reentrant: as in torch.
        stream: `schedule.state.random` of the schedule whose modules `function` calls.
        **kwargs: of torch's checkpoint and, without `use_reentrant`, of the function.
    """
    if stream is None:
        return recompute.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    position = stream.position()

    def at_its_position(*inputs: Any, **named: Any) -> Any:
        with stream.at(*position):
            return function(*inputs, **named)

    return recompute.checkpoint(at_its_position, *args, use_reentrant=use_reentrant, **kwargs)
