"""All-reduce of gradients in buckets: the gradients of several parameters are sent in one collective."""

from collections.abc import Container, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.parallel.begun import collective, explained
from slapo_zoo.parallel.local_tensors import held_here, is_divided

BUCKET_BYTES = 32 << 20  # large enough to amortise a collective, small beside a model


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, factor: float = 1.0
) -> None:
    """All-reduce `factor` * `.grad` of the parameters over a group, in few large collectives. A `.grad` of None counts
    as 0, but stays None if it is None on every rank, so that an optimizer skips the parameter (also its weight decay),
    as it does in one process. With `group` None nothing is done.
    """
    if group is not None:
        Buckets(list(parameters), group, factor).finish()


def buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield lists of consecutive parameters of one dtype, each list of about BUCKET_BYTES."""
    bucket, size = [], 0
    for p in parameters:
        if bucket and (p.dtype != bucket[0].dtype or size + p.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.nbytes
    if bucket:
        yield bucket


class Buckets:
    """All-reduce of the gradients of parameters in few collectives, in the same order on all ranks of a group. Each begins
    when all its gradients were added, at the latest in `finish`. Arguments are those of `Bucket`, of any dtypes.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Any, factor: float = 1.0):
        self.parameters = parameters
        self.every = [Bucket(each, group, factor) for each in buckets(parameters)]
        self.waiting = list(self.every)  # those whose all-reduce has not begun
        self.bucket_of = {id(p): bucket for bucket in self.every for p in bucket.parameters}

    def expect(self, p: Any) -> None:
        """End the all-reduce, if there is one, that still reads `.grad` of `p`, to which autograd will add."""
        bucket = self.bucket_of.get(id(p))
        if bucket and bucket.work is not None:
            bucket.wait()
            self.waiting.append(bucket)

    def add(self, p: Any) -> None:
        """Start the all-reduces that are complete now that autograd has added a gradient to `.grad` of `p`."""
        self.bucket_of[id(p)].missing.discard(id(p))
        while self.waiting and not self.waiting[0].missing:
            self.waiting.pop(0).start()

    def finish(self, hosts: dist.ProcessGroup | None = None) -> bool:
        """Start the all-reduces that are left, and wait for all. Return whether a gradient is missing on this rank's GPU;
        then ranks may exchange over `hosts`, their group for CPU tensors, which are, so that no host waits for a GPU.
        """
        for bucket in self.waiting:
            bucket.start()
        here, somewhere = [p.grad is not None for p in self.parameters], None
        if hosts is not None:
            held = torch.tensor(here, dtype=torch.int32, device="cpu")
            dist.all_reduce(held, dist.ReduceOp.MAX, hosts)
            pairs = zip(self.parameters, held.tolist(), strict=True)
            somewhere = {id(p) for p, some in pairs if some}
        for bucket in self.every:
            bucket.wait(somewhere)
        return not all(here) and self.parameters[0].device.type != "cpu"


class Bucket:
    """All-reduce of the gradients of a few parameters in one collective.

    rewrite:  p.grad  -->  a view of one flat tensor; a gradient is copied at most once, and not at all if it
              already is a view of the flat tensor of an earlier all-reduce

    Args:
        parameters: parameters of one dtype.
        group: process group of the all-reduce.
        factor: number by which the sum is multiplied; 1 / size of the group averages.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Any, factor: float = 1.0):
        self.parameters, self.group, self.factor = parameters, group, factor
        self.missing = {id(p) for p in parameters}  # parameters whose gradient is not computed yet
        self.flat: Any = None
        self.work: Any = None

    def start(self) -> "Bucket":
        """Start the all-reduce of the current `.grad`s and return this bucket."""
        self.wait()
        grads = [p.grad if p.grad is None else held_here(p.grad) for p in self.parameters]
        self.present = [grad is not None for grad in grads]
        self.sizes = [held_here(p).numel() for p in self.parameters]
        self.starts = [0, *accumulate(self.sizes)][:-1]
        shared: Any = self._shared(grads) if all(self.present) else None
        self.flat = shared
        if shared is None:
            self._copy(grads)
        elif self.factor != 1.0:
            self.flat.mul_(self.factor)
        self.held = self.flat[-len(self.sizes) :]  # 1, or 0 where missing
        if all(self.present):
            self.held.fill_(1.0)
        else:
            for place, is_there in zip(self.held, self.present, strict=True):
                place.fill_(float(is_there))  # copying a list would make the host wait
        self.work = collective(dist.all_reduce, self.flat, group=self.group, async_op=True)
        return self

    def _shared(self, grads: list[Any]) -> Tensor | None:
        """Return the flat tensor of an earlier all-reduce if all `grads` are views of it, in order; else None."""
        base = grads[0]._base
        if base is None or base.ndim != 1 or base.dtype != grads[0].dtype:
            return None
        same = all(g._base is base and g.storage_offset() == start and g.stride() == _strides(p)
                   for g, start, p in zip(grads, self.starts, self.parameters, strict=True))  # fmt: skip
        return base if same and base.numel() == sum(self.sizes) + len(self.sizes) else None

    def _copy(self, grads: list[Any]) -> None:
        """Copy the gradients `grads` (None: zeros) into a new tensor `flat`, to be all-reduced. A parameter's `.grad`
        becomes its part of `flat`; one that is a view of another tensor already, or sharded over dp, stays as it is.
        """
        like = held_here(self.parameters[0])
        size = sum(self.sizes) + len(self.sizes)
        self.flat = like.new_empty(size, requires_grad=False)
        for p, grad, part in zip(self.parameters, grads, self._parts(), strict=True):
            piece = torch.zeros_like(held_here(p)) if grad is None else grad
            torch.mul(piece, self.factor, out=part) if self.factor != 1.0 else part.copy_(piece)
            if p.grad is not None and not is_divided(p.grad) and p.grad._base is None:
                p.grad = part

    def _parts(self) -> list[Tensor]:
        """Return a view of the flat tensor for each parameter, with the parameter's strides."""
        both = zip(self.parameters, self.starts, strict=True)
        return [self.flat.as_strided(held_here(p).shape, _strides(p), start) for p, start in both]

    def wait(self, somewhere: Container[int] | None = None) -> None:
        """Wait for the all-reduce, if one was started, and store the sums in `.grad`. `somewhere` holds the `id()` of
        each parameter that has a gradient on some rank; if it is None, flags that were sent along with the gradients
        say which parameters these are.
        """
        if self.work is None:
            return
        explained(self.work.wait)
        self.work = None
        if somewhere is not None:
            held = [id(p) in somewhere for p in self.parameters]
        else:
            held = self.present if all(self.present) else self.held.tolist()
        for p, part, some in zip(self.parameters, self._parts(), held, strict=True):
            if p.grad is None and some:
                p.grad = torch.zeros_like(p) if is_divided(p) else part
            if p.grad is not None and held_here(p.grad).data_ptr() != part.data_ptr():
                held_here(p.grad).copy_(part)
        self.flat = None


def _strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the strides of a parameter, or contiguous strides of its shape if the parameter is not dense."""
    here = held_here(parameter)
    return torch.empty_like(here, device="meta").stride()
