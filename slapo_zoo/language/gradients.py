"""What happens to gradients after a backward: sums over dp and ties, and the global norm."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.language.directive import State
from slapo_zoo.parallel.local_tensors import dp_copies, held_here, is_divided
from slapo_zoo.parallel.mesh import Mesh

BUCKET_BYTES = 32 << 20  # large enough to amortise a collective, small beside a model
NORM_ROW = 4096  # elements


@contextmanager
def only_new(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hide gradients of earlier steps while the new ones are made and reduced, then add them.

    After a failure the gradients are those of before: half a step is of no use.
    """
    earlier = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    except BaseException:
        for p, grad in zip(parameters, earlier, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(parameters, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None
) -> None:
    """Sum `.grad` over a group, in a few large collectives; a missing gradient counts as 0.

    One that every rank misses stays missing: an optimizer leaves its parameter alone, as it would in
    one process, where it would decay one whose gradient is 0.
    """
    if group is None:
        return
    under_way = [FlatSum(bucket, group) for bucket in buckets(list(parameters))]
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

    def finish(self) -> None:
        """Wait for it; `.grad` of each parameter is the sum."""
        self.work.wait()
        held = self.present if all(self.present) else self.held.tolist()
        for p, part, some in zip(self.parameters, self._parts(), held, strict=True):
            if p.grad is None and some:
                p.grad = torch.zeros_like(p) if is_divided(p) else part
            if p.grad is not None and held_here(p.grad).data_ptr() != part.data_ptr():
                held_here(p.grad).copy_(part)


def _strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of a parameter without gaps its own, else those of a contiguous tensor."""
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


def global_norm(
    named: Iterable[tuple[str, nn.Parameter]], state: State, mesh: Mesh, owned: set[str]
) -> Tensor:
    """The 2-norm of all gradients of the whole model, as one process would compute it.

    Args:
        named: local parameters.
        state: of the schedule; tells which are sharded over tp.
        mesh: sums run over tp (sharded parameters) and pp.
        owned: names that this stage counts (a tied parameter counts on one stage).
    """
    divided, whole, device, dtype = [], [], torch.device("cpu"), torch.float32
    named = list(named)
    any_divided_over_dp = any(is_divided(p) for _, p in named)
    for name, p in named:
        dtype, device = torch.promote_types(dtype, p.dtype), p.device
        if p.grad is None or name not in owned:
            continue
        copies = dp_copies(p, mesh.dp) if any_divided_over_dp else 1
        grad = held_here(p.grad)
        placed = state.placed.get(name)
        if placed is None:
            whole.append(grad if copies == 1 else grad / copies**0.5)
            continue
        replicas = copies * placed.placement.replicas(
            placed.shape[placed.placement.axis], mesh.tp, mesh.coord("tp")
        )
        divided.append(grad if replicas == 1 else grad / replicas**0.5)
    squares = torch.stack([_square(divided, device), _square(whole, device)])
    if any_divided_over_dp:
        dist.all_reduce(squares, group=mesh.group("dp"))
    if mesh.tp > 1:
        local = squares[:1].clone()
        dist.all_reduce(local, group=mesh.group("tp"))
        squares = torch.cat([local, squares[1:]])
    total = squares.sum()
    if mesh.pp > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    return total.sqrt().to(dtype)


def scale(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that a global norm of `norm` becomes at most `max_norm`."""
    if not any(is_divided(p) for p in parameters):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils does it
    for p in parameters:
        if p.grad is not None:
            held_here(p.grad).mul_(factor.to(p.grad.device))


def _square(grads: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares, in float64.

    On a CPU one norm over 23 million float32 elements is wrong by a thousandth: torch adds them up
    one after the other. So rows first, then the norms of the rows.
    """
    norms = [norm for grad in grads for norm in _row_norms(grad)]
    if not norms:
        return torch.zeros((), device=device, dtype=torch.float64)
    return torch.cat(norms).double().square().sum()


def _row_norms(grad: Tensor) -> list[Tensor]:
    wide = torch.promote_types(grad.dtype, torch.float32)
    if not grad.is_contiguous():
        return [torch.linalg.vector_norm(grad, dim=-1, dtype=wide).reshape(-1)]
    flat, whole = grad.view(-1), grad.numel() // NORM_ROW * NORM_ROW
    rows = (flat[:whole].view(-1, NORM_ROW), flat[whole:].view(1, -1))
    return [torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in rows if part.numel()]
