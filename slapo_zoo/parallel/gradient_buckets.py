"""Gradients are summed over a group (dp, tied stages) bucket by bucket, each bucket in one collective."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.parallel.local_tensors import held_here, is_divided

BUCKET_BYTES = 32 << 20  # large enough to amortise a collective, small beside a model


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, factor: float = 1.0
) -> None:
    """Sum `.grad` times a factor over a group, in a few large collectives; a missing one counts as 0.

    One that every rank misses stays missing: an optimizer leaves its parameter alone, as it would in
    one process, where it would decay one whose gradient is 0.
    """
    if group is None:
        return
    under_way = [FlatSum(bucket, group, factor) for bucket in buckets(list(parameters))]
    for one in under_way:
        one.finish()


class FlatSum:
    """The sum over a group of the gradients of a few parameters, under way in one collective.

    rewrite:  p.grad  -->  a view of one flat tensor, where it was summed; it is copied there at most
              once, and not back. Where it is such a view already, nothing is copied.

    Args:
        parameters: of one dtype.
        group: their gradients are the sum over it.
        factor: times this; 1 / size gives the average.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Any, factor: float = 1.0):
        self.parameters = parameters
        grads = [p.grad if p.grad is None else held_here(p.grad) for p in parameters]
        self.present = [grad is not None for grad in grads]
        sizes = [held_here(p).numel() for p in parameters]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.flat = self._shared(grads) if all(self.present) else None
        if self.flat is None:
            like = held_here(parameters[0])
            self.flat = like.new_empty(sum(sizes) + len(sizes), requires_grad=False)
            pieces = [torch.zeros_like(held_here(p)) if g is None else g
                      for p, g in zip(parameters, grads, strict=True)]  # fmt: skip
            for part, piece in zip(self._parts(), pieces, strict=True):
                torch.mul(piece, factor, out=part) if factor != 1.0 else part.copy_(piece)
            self._point()
        elif factor != 1.0:
            self.flat.mul_(factor)
        self.held = self.flat[-len(sizes) :]  # 1, or 0 where missing
        if all(self.present):
            self.held.fill_(1.0)
        else:
            for place, is_there in zip(self.held, self.present, strict=True):
                place.fill_(float(is_there))  # a copied list would be waited for
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def _shared(self, grads: list[Any]) -> Tensor | None:
        """The flat tensor that an earlier sum has left them in, or None."""
        base = grads[0]._base
        if base is None or base.ndim != 1 or base.dtype != grads[0].dtype:
            return None
        same = all(g._base is base and g.storage_offset() == start and g.stride() == _strides(p)
                   for g, start, p in zip(grads, self.starts, self.parameters, strict=True))  # fmt: skip
        return base if same and base.numel() == sum(g.numel() + 1 for g in grads) else None

    def _parts(self) -> list[Tensor]:
        """A view in the flat tensor for each parameter, laid out as the parameter is."""
        assert self.flat is not None  # noqa: S101 - set by then
        both = zip(self.parameters, self.starts, strict=True)
        return [self.flat.as_strided(held_here(p).shape, _strides(p), start) for p, start in both]

    def _point(self) -> None:
        """`.grad` of those that have one is its view; gradients elsewhere in use get a copy later."""
        for p, part in zip(self.parameters, self._parts(), strict=True):
            if p.grad is not None and not is_divided(p.grad) and p.grad._base is None:
                p.grad = part

    def finish(self, somewhere: Container[int] | None = None) -> None:
        """Wait for it; `.grad` of each parameter is the sum; `somewhere`: ids of those that a rank has."""
        self.work.wait()
        if somewhere is not None:
            held = [id(p) in somewhere for p in self.parameters]
        else:
            held = self.present if all(self.present) else self.held.tolist()
        for p, part, some in zip(self.parameters, self._parts(), held, strict=True):
            if p.grad is None and some:
                p.grad = torch.zeros_like(p) if is_divided(p) else part
            if p.grad is not None and held_here(p.grad).data_ptr() != part.data_ptr():
                held_here(p.grad).copy_(part)


def _strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the strides of a parameter without gaps, else those of a contiguous tensor."""
    here = held_here(parameter)
    return torch.empty_like(here, device="meta").stride()


def buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype, each of about BUCKET_BYTES."""
    bucket, size = [], 0
    for p in parameters:
        if bucket and (p.dtype != bucket[0].dtype or size + p.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.nbytes
    if bucket:
        yield bucket


class Bucket:
    """Parameters whose gradients are averaged over dp in one collective."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.ready: set[int] = set()
        self.sum: FlatSum | None = None
        self.late = False  # some gradient was added to after the sum began

    def start(self, group: Any, size: int) -> None:
        """Begin to average what `.grad` holds now; an average of averages stays what it is."""
        self.wait()
        self.sum, self.late = FlatSum(self.parameters, group, 1.0 / size), False

    def wait(self, somewhere: set[int] | None = None) -> None:
        """`.grad` may be read and written again."""
        if self.sum is not None:
            self.sum.finish(somewhere)
            self.sum = None
