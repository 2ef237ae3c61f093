"""What happens to gradients after a backward: sums over dp and ties, and the global norm."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.language.directive import State
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.local_tensors import held_here, is_divided

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
    for bucket in buckets(list(parameters)):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        here = [held_here(grad) for grad in grads]
        held = here[0].new_tensor([p.grad is not None for p in bucket])  # 1, or 0 where missing
        flat = torch.cat([*(grad.reshape(-1) for grad in here), held])
        dist.all_reduce(flat, group=group)
        *parts, held = flat.split([*(grad.numel() for grad in here), len(bucket)])
        for i, (p, grad, mine, part) in enumerate(zip(bucket, grads, here, parts, strict=True)):
            if p.grad is None and not held[i]:
                continue
            mine.copy_(part.view_as(mine))
            p.grad = grad


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
        state: of the schedule; tells which are divided over tp.
        mesh: sums run over tp (divided parameters) and pp.
        owned: names that this stage counts (a tied parameter counts on one stage).
    """
    divided, whole, device, dtype = [], [], torch.device("cpu"), torch.float32
    any_divided_over_dp = False
    for name, p in named:
        dtype = torch.promote_types(dtype, p.dtype)
        device, any_divided_over_dp = p.device, any_divided_over_dp or is_divided(p)
        if p.grad is None or name not in owned:
            continue
        placed = state.placed.get(name)
        if placed is None:
            whole.append(held_here(p.grad))
            continue
        replicas = placed.placement.replicas(
            placed.shape[placed.placement.axis], mesh.tp, mesh.coord("tp")
        )
        grad = held_here(p.grad)
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
