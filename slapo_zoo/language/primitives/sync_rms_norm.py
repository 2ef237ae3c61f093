"""sync_rms_norm: compute the mean of squares over columns that are sharded over a mesh dim."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.language.primitives.seen import Seen
from slapo_zoo.parallel.collectives import reduce_backward, reduce_forward


@primitive("sync_rms_norm")
@dataclass(frozen=True)
class SyncRMSNorm(Directive):
    """Normalise sharded columns by the mean of squares over the columns of all ranks.

    rewrite:  y_r = w_r * x_r / sqrt(mean(x_r^2) + eps)  -->  y_r = w_r * x_r / sqrt(mean(x^2) + eps), x = x_0 .. x_(n-1)
    why:      OLMo-2 normalises the queries (and keys) of all heads together, before they are split into heads
    note:     the class's own forward runs, with eps + mean(x^2) - mean(x_r^2) in place of eps, so results are
              rounded as without sharding. Columns that several ranks hold (KV heads) count once
    errors:   the weight is not sharded; no attribute `eps` that is a number; the module's forward was replaced

    Args:
        eps: name of the module's attribute that the forward adds to the mean; not used for nn.RMSNorm.
        mesh_dim: the mesh dim that the columns are sharded over.
    """

    eps: str = "variance_epsilon"
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        if site.placed("weight") is None:
            hint = "call shard('weight', 0) first"
            raise self.fail(site, "the module's weight is not sharded", hint)
        of_torch = isinstance(site.module, nn.RMSNorm)
        if not of_torch and not isinstance(getattr(site.module, self.eps, None), float):
            hint = "pass eps=, the name of the attribute that the module's forward adds to the mean"
            raise self.fail(site, f"found no attribute {self.eps!r} that is a float", hint)
        if "forward" in vars(site.module):
            hint = "move this directive before the one that replaced the forward"
            raise self.fail(site, "an earlier directive replaced the forward", hint)

    def apply(self, site: Site) -> None:
        n, placed = site.mesh.size(self.mesh_dim), site.placed("weight")
        if n == 1 or placed is None:
            return
        module: Any = site.module
        size, rank = placed.shape[0], site.mesh.coord(self.mesh_dim)
        copies = placed.placement.replicas(size, n, rank)

        def forward(x: Tensor) -> Tensor:
            squares = x.to(torch.promote_types(x.dtype, torch.float32)).square()
            part = squares.sum(-1, keepdim=True) / copies
            group = site.group(self)
            mean = reduce_backward(reduce_forward(part, group), group) / size
            if isinstance(module, nn.RMSNorm):  # torch's function takes no tensor for eps
                eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
                return (x * (mean + eps).rsqrt() * module.weight).to(x.dtype)
            eps = mean - squares.mean(-1, keepdim=True) + getattr(module, self.eps)
            return type(module).forward(Seen(module, {self.eps: eps}), x)

        module.forward = forward
