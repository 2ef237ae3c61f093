"""What happens to gradients after a backward: sums over dp and ties, and the global norm."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.directive import State
from slapo_zoo.mesh import Mesh

BUCKET_BYTES = 32 << 20  # large enough to amortise a collective, small beside a model


@contextmanager
def only_new(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hide gradients of earlier steps while the new ones are made and reduced, then add them."""
    earlier = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, earlier, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None
) -> None:
    """Sum `.grad` over a group, in a few large collectives; a missing gradient counts as 0."""
    if group is None:
        return
    for bucket in _buckets(list(parameters)):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for p, grad, part in zip(
            bucket, grads, flat.split([g.numel() for g in grads]), strict=True
        ):
            p.grad = grad.copy_(part.view_as(grad))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
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
    divided, whole, device = [], [], torch.device("cpu")
    for name, p in named:
        device = p.device
        if p.grad is None or name not in owned:
            continue
        placed = state.placed.get(name)
        if placed is None:
            whole.append(p.grad)
            continue
        replicas = placed.placement.replicas(
            placed.shape[placed.placement.axis], mesh.tp, mesh.coord("tp")
        )
        divided.append(p.grad if replicas == 1 else p.grad / replicas**0.5)
    squares = torch.stack([_square(divided, device), _square(whole, device)])
    if mesh.tp > 1:
        local = squares[:1].clone()
        dist.all_reduce(local, group=mesh.group("tp"))
        squares = torch.cat([local, squares[1:]])
    total = squares.sum()
    if mesh.pp > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    return total.sqrt()


def _square(grads: list[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), device=device)
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(grad, dtype=wide) for grad in grads]
    return torch.stack(norms).square().sum()
