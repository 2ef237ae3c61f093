"""Collectives with the backward that tensor parallelism needs; each is the identity for group None.

`torch.distributed._functional_collectives.all_reduce` reduces the gradient too, so it is neither
of the two functions that Megatron-LM calls f and g (arXiv:1909.08053, section 3).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.parallel import thread_sums
from slapo_zoo.parallel.begun import collective, explained
from slapo_zoo.parallel.compat import all_gather_single, reduce_scatter_single
from slapo_zoo.parallel.mesh import ShapeOnlyGroup
from slapo_zoo.parallel.once import once

Group = dist.ProcessGroup | Any | None
CHANNELS_LAST = torch.channels_last
# `verify`'s functions, called with (kind, unsharded tensor, group) before each collective
OBSERVERS: list[Any] = []


def group_size(group: Group) -> int:
    """Return the number of ranks in the group; 1 for None."""
    if group is None or isinstance(group, ShapeOnlyGroup):
        return 1 if group is None else group.size
    return dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Return this rank's number in the group; 0 for None."""
    if group is None or isinstance(group, ShapeOnlyGroup):
        return 0 if group is None else group.rank
    return dist.get_rank(group)


def _dry_run_of(group: Group, kind: str, whole: Tensor) -> bool:
    """Report a collective. Return True if `group` is a ShapeOnlyGroup, a dry run's, over which nothing is sent: its
    `note`, if any, is called with (kind, bytes). Else call each function in OBSERVERS with the arguments.

    Args:
        group: process group, or its replacement (ShapeOnlyGroup) in a dry run.
        kind: name of the collective, e.g. "all_gather".
        whole: tensor that is reduced, scattered or exchanged; for an all-gather its result.
    """
    if isinstance(group, ShapeOnlyGroup) and group.note is not None:
        group.note(kind, whole.nbytes)
    for observer in OBSERVERS if not isinstance(group, ShapeOnlyGroup) else ():
        observer(kind, whole, group)
    return isinstance(group, ShapeOnlyGroup)


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """Sum x over the group in place and return x; with group None or in a dry run, x is unchanged."""
    if group is not None and not _dry_run_of(group, "all_reduce", x):
        collective(thread_sums.all_reduce, x, op=dist.ReduceOp.SUM, group=group)
    return x


def gather_along(x: Tensor, axis: int, group: Group) -> Tensor:
    """All-gather x [.., s, ..] of each rank along `axis` to [.., n * s, ..] on all n ranks; no gradient."""
    flat = x.movedim(axis, 0).contiguous()
    out = flat.new_empty((group_size(group) * flat.shape[0], *flat.shape[1:]))
    if not _dry_run_of(group, "all_gather", out):
        collective(all_gather_single, out, flat, group=group)
    return _in_format_of(x, out.movedim(0, axis))


def reduce_scatter_along(x: Tensor, axis: int, group: Group) -> Tensor:
    """Sum x [.., n * s, ..] over the n ranks; return this rank's slice [.., s, ..] of the sum along `axis`; no gradient."""
    flat = x.movedim(axis, 0).contiguous()
    out = flat.new_empty((flat.shape[0] // group_size(group), *flat.shape[1:]))
    if not _dry_run_of(group, "reduce_scatter", flat):
        collective(reduce_scatter_single, out, flat, group=group)
    return _in_format_of(x, out.movedim(0, axis))


def slice_along(x: Tensor, axis: int, group: Group) -> Tensor:
    """Return this rank's slice [.., s, ..] along `axis` of an x [.., n * s, ..] that is the same on all n ranks."""
    size = x.shape[axis] // group_size(group)
    return x.narrow(axis, group_rank(group) * size, size).contiguous()


def exchange_along(x: Tensor, split_axis: int, join_axis: int, group: Group) -> Tensor:
    """Reshard x [.., n * s, .., t, ..] on each of n ranks to [.., s, .., n * t, ..] by an all-to-all, without a
    gradient. The axis `split_axis` (n * s) is split over the ranks, the axis `join_axis` (t) is concatenated.
    """
    n = group_size(group)
    parts = torch.stack(x.chunk(n, split_axis))
    out = torch.empty_like(parts)
    if not _dry_run_of(group, "all_to_all", parts):
        collective(dist.all_to_all_single, out, parts, group=group)
    return torch.cat(list(out), join_axis)


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the ranks of the group in a new tensor of the same memory format; no gradient."""
    if not _channels_last(x):
        return all_reduce_(x.contiguous().clone(), group)
    y = x.clone()
    all_reduce_(y.permute(0, 2, 3, 1), group)  # contiguous, and the same memory
    return y


def _channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=CHANNELS_LAST)


def _in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """Return y in contiguous memory, or in channels-last memory if x is channels last. The result is no view, because
    autograd forbids in-place changes (Falcon makes one) of a view that a Function returns.
    """
    if _channels_last(x):
        return y.contiguous(memory_format=CHANNELS_LAST)
    return torch.ops.aten._unsafe_view(y.contiguous(), y.shape)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    @once
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def with_gradient(x: Tensor, there: Any, back: Any) -> Tensor:
    """Return `there(x)`; `back` maps the gradient of this result to that of x. Both are functions of one tensor."""
    return _WithGradient.apply(x, there, back)


def viewed(x: Tensor) -> Tensor:
    """Return a view of x; an autograd function must not return its own input."""
    return x.view_as(x)


def reduce_forward(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the group's ranks; the gradient passes to x unchanged (Megatron-LM's function g)."""
    return x if group is None else with_gradient(x, partial(summed, group=group), lambda grad: grad)


def reduce_backward(x: Tensor, group: Group) -> Tensor:
    """Return x unchanged; its gradient is summed over the group's ranks (Megatron-LM's function f)."""
    return x if group is None else with_gradient(x, viewed, partial(summed, group=group))


def _along(x: Tensor, axis: int, group: Group, there: Any, back: Any) -> Tensor:
    """Return `there(x, axis, group)`, whose gradient is `back(gradient, axis, group)`; x itself for group None."""
    if group is None:
        return x
    return with_gradient(x, *(partial(run, axis=axis, group=group) for run in (there, back)))


def all_gather(x: Tensor, axis: int, group: Group, sharded_gradient: bool = True) -> Tensor:
    """All-gather x [.., s, ..] to [.., n * s, ..] along an axis; with group None, return x. The backward reduce-scatters
    the result's gradient or, if `sharded_gradient` is False, slices it, since it is then equal on all ranks.
    """
    back = reduce_scatter_along if sharded_gradient else slice_along
    return _along(x, axis, group, gather_along, back)


def reduce_scatter(x: Tensor, axis: int, group: Group) -> Tensor:
    """Reduce-scatter x [.., n * s, ..] to this rank's [.., s, ..] along an axis; the gradient is all-gathered."""
    return _along(x, axis, group, reduce_scatter_along, gather_along)


def scatter(x: Tensor, axis: int, group: Group) -> Tensor:
    """Return this rank's slice [.., s, ..] along `axis` of an x [.., n * s, ..] that is equal on all n ranks; the
    gradient is all-gathered.
    """
    return _along(x, axis, group, slice_along, gather_along)


def all_to_all(x: Tensor, split_axis: int, join_axis: int, group: Group) -> Tensor:
    """Reshard x over n ranks: x is sharded along `join_axis`, the result along `split_axis`. An all-to-all makes
    [.., n * s, .., t, ..] to [.., s, .., n * t, ..]; the backward does the opposite. For group None, return x.
    """
    if group is None:
        return x
    there = partial(exchange_along, split_axis=split_axis, join_axis=join_axis, group=group)
    back = partial(exchange_along, split_axis=join_axis, join_axis=split_axis, group=group)
    return with_gradient(x, there, back)


def begin_shift(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to send x to the next rank of the group (the last sends to the first); return a function that waits for the
    x of the rank before and returns it, without a gradient. x has one shape on all ranks.
    """
    n, r = group_size(group), group_rank(group)
    flat = x.contiguous().view(-1)
    out, work = torch.empty_like(flat), None
    if not _dry_run_of(group, "shift", flat):
        sizes = [[flat.numel() * (i == (r + step) % n) for i in range(n)] for step in (-1, 1)]
        work = collective(dist.all_to_all_single, out, flat, *sizes, group=group, async_op=True)

    def wait(_flat: Tensor = flat) -> Tensor:  # which is read until then
        if work is not None:
            explained(work.wait)
        return out.view(x.shape)

    return wait
