"""fork_rng: a module draws its random numbers from a stream of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo import rng
from slapo_zoo.directive import Directive, Site, primitive


@primitive("fork_rng")
@dataclass(frozen=True)
class ForkRng(Directive):
    """Make the randomness of a module independent of what ran before it.

    rewrite:  Dropout:  y = dropout(x)  -->  y = x * mask(seed, step, path, batch row) / (1 - p)
              others:   y = f(x)        -->  y = f(x) under a generator seeded for (step, path, row)
    note:     a Dropout then draws the same mask on every layout; `eval()` switches it off

    Args:
        per_rank: for modules other than Dropout, draw differently on every tp rank (for an
            activation that is divided over them).
    """

    per_rank: bool = False

    def apply(self, site: Site) -> None:
        if isinstance(site.module, nn.Dropout):
            site.module.forward = _dropout(site, site.module)
        else:
            site.module.forward = self._forked(site, site.module.forward)

    def _forked(self, site: Site, forward: Callable) -> Callable:
        stream, rank = site.state.random, site.mesh.coord("tp") if self.per_rank else 0

        @wraps(forward)
        def forked(*args: Any, **kwargs: Any) -> Any:
            if not site.module.training:
                return forward(*args, **kwargs)
            with torch.random.fork_rng():
                torch.manual_seed(rng.mix(stream.seed, *stream.position(), hash_path(site), rank))
                return forward(*args, **kwargs)

        return forked


def hash_path(site: Site) -> int:
    """The same integer for a path in every process."""
    return rng.zlib.crc32(site.path.encode())


def _dropout(site: Site, module: nn.Dropout) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        if not module.training:
            return input
        return rng.dropout(input, module.p, site.state.random, site.path)

    return forward
