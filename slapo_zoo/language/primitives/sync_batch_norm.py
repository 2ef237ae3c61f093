"""sync_batch_norm: compute batch statistics over the rows of all ranks of a mesh dim."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.parallel.collectives import all_reduce_, gather_along
from slapo_zoo.parallel.once import once


@primitive("sync_batch_norm")
@dataclass(frozen=True)
class SyncBatchNorm(Directive):
    """Normalise with the mean and variance over the rows of all ranks, on any device.

    rewrite:  y = (x - mean(x_r)) / std(x_r)  -->  y = (x - mean(x)) / std(x), x = x_0 .. x_(n-1)
    note:     `torch.nn.SyncBatchNorm` needs a GPU. A recomputed forward (`checkpoint`) does not
              update the running statistics again, on any mesh. Ranks may have different numbers of rows;
              in training, all ranks of the mesh dim must run the forward
    errors:   not a BatchNorm2d; one that averages over all batches (momentum=None)

    Args:
        mesh_dim: the mesh dim that the batch rows are sharded over.
    """

    mesh_dim: str = "dp"

    def check(self, site: Site) -> None:
        found = type(site.module).__name__
        if not isinstance(site.module, nn.BatchNorm2d):
            hint = "select only modules of class BatchNorm2d"
            raise self.fail(site, f"found {found}, expected BatchNorm2d", hint)
        if site.module.momentum is None:
            problem = "the module's momentum is None (a mean over all batches), expected a number"
            raise self.fail(site, problem, "set the module's momentum, e.g. to 0.1")

    def apply(self, site: Site) -> None:
        module: Any = site.module

        def forward(x: Tensor) -> Tensor:
            if not module.training:
                return type(module).forward(module, x)
            return _train(module, x, site.group(self))

        module.forward = forward


def _train(module: Any, x: Tensor, group: Any) -> Tensor:
    old_mean, old_var = module.running_mean, module.running_var
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    if group is None:
        own = module.weight, module.bias, True, module.momentum, module.eps
        return nn.functional.batch_norm(x, old_mean, old_var, *own)
    mean, var, count = _statistics(x, group)
    if old_mean is not None and old_var is not None:
        unbiased = var * (count / (count - 1).clamp(min=1))
        old_mean.lerp_(mean.to(old_mean.dtype), module.momentum)
        old_var.lerp_(unbiased.to(old_var.dtype), module.momentum)
    return _Normalise.apply(x, module.weight, module.bias, mean, var, count, module.eps, group)


@torch.no_grad()
def _statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [C], variance [C] and the number of pixels [1] of x [B, C, H, W] over all ranks of `group`.

    Each rank takes the variance around its own mean; the squared distance of that mean from the global mean is added
    (Chan et al. 1979). This loses no digits where the mean is far from 0.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.to(wide), (0, 2, 3), correction=0)
    count = torch.full_like(mean[:1], x.numel() // x.shape[1])
    if group is None:
        return mean, var, count
    every = gather_along(torch.cat([mean, var, count])[None], 0, group)
    means, variances, counts = every[:, : len(mean)], every[:, len(mean) : -1], every[:, -1:]
    share = counts / counts.sum()
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean).square())).sum(0)
    return mean, var, counts.sum(0)


class _Normalise(torch.autograd.Function):
    """Autograd function y = (x - mean) / sqrt(var + eps) * weight + bias of x [B, C, H, W], with `mean` and `var` [C]
    over the `count` [1] pixels of all ranks of `group`, over which the backward all-reduces two sums [2, C].
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, count, eps, group):
        ctx.group = group
        scale = (var + eps).rsqrt()
        normal = (x - _wide(mean, x)) * _wide(scale, x)
        ctx.save_for_backward(normal, weight, scale, count)
        return normal * _wide(weight, x) + _wide(bias, x)

    @staticmethod
    @once
    def backward(ctx, dy):
        normal, weight, scale, count = ctx.saved_tensors
        dtype = scale.dtype
        db, dw = dy.sum((0, 2, 3), dtype=dtype), (dy * normal).sum((0, 2, 3), dtype=dtype)
        sums = all_reduce_(torch.stack([db, dw]), ctx.group) / count
        dx = (dy - _wide(sums[0], dy) - normal * _wide(sums[1], dy)) * _wide(weight * scale, dy)
        return dx, dw.to(weight.dtype), db.to(weight.dtype), None, None, None, None, None


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """Return x [C] as [C, 1, 1] in the dtype of `like`, to broadcast over [B, C, H, W]."""
    return x.to(like.dtype)[:, None, None]
