"""Collectives with the backward that tensor parallelism needs; each is the identity for group None.

`torch.distributed._functional_collectives.all_reduce` reduces the gradient too, so it is neither
of the two functions that Megatron-LM calls f and g (arXiv:1909.08053, section 3).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.compat import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None


def gather_along(x: Tensor, axis: int, group: Group) -> Tensor:
    """x [.., s, ..] on each rank --> [.., n * s, ..] on all; no gradient."""
    n = dist.get_world_size(group)
    flat = x.movedim(axis, 0).contiguous()
    out = flat.new_empty((n * flat.shape[0], *flat.shape[1:]))
    all_gather_single(out, flat, group=group)
    return out.movedim(0, axis)


def reduce_scatter_along(x: Tensor, axis: int, group: Group) -> Tensor:
    """x [.., n * s, ..] on each rank --> its own slice [.., s, ..] of the sum; no gradient."""
    n = dist.get_world_size(group)
    flat = x.movedim(axis, 0).contiguous()
    out = flat.new_empty((flat.shape[0] // n, *flat.shape[1:]))
    reduce_scatter_single(out, flat, group=group)
    return out.movedim(0, axis)


def slice_along(x: Tensor, axis: int, group: Group) -> Tensor:
    """x [.., n * s, ..] the same on all --> this rank's slice [.., s, ..]."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    size = x.shape[axis] // n
    return x.narrow(axis, r * size, size).contiguous()


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the group, in a new tensor; no gradient."""
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class _ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, group, sharded_gradient):
        ctx.axis, ctx.group, ctx.sharded_gradient = axis, group, sharded_gradient
        return gather_along(x, axis, group)

    @staticmethod
    def backward(ctx, grad):
        back = reduce_scatter_along if ctx.sharded_gradient else slice_along
        return back(grad, ctx.axis, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, group):
        ctx.axis, ctx.group = axis, group
        return reduce_scatter_along(x, axis, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_along(grad, ctx.axis, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, group):
        ctx.axis, ctx.group = axis, group
        return slice_along(x, axis, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_along(grad, ctx.axis, ctx.group), None, None


def reduce_forward(x: Tensor, group: Group) -> Tensor:
    """Megatron's g: y = sum over ranks of x;  dx = dy."""
    return x if group is None else _ReduceForward.apply(x, group)


def reduce_backward(x: Tensor, group: Group) -> Tensor:
    """Megatron's f: y = x;  dx = sum over ranks of dy."""
    return x if group is None else _ReduceBackward.apply(x, group)


def all_gather(x: Tensor, axis: int, group: Group, sharded_gradient: bool = True) -> Tensor:
    """Concatenate over ranks; dx is reduce-scattered, or sliced when dy is the same on all ranks."""
    return x if group is None else _Gather.apply(x, axis, group, sharded_gradient)


def reduce_scatter(x: Tensor, axis: int, group: Group) -> Tensor:
    """Sum over ranks and keep this rank's slice; dx is the all-gather of dy."""
    return x if group is None else _ReduceScatter.apply(x, axis, group)


def scatter(x: Tensor, axis: int, group: Group) -> Tensor:
    """Keep this rank's slice of x, which is the same on all ranks; dx is the all-gather of dy."""
    return x if group is None else _Scatter.apply(x, axis, group)
