"""Gradients after a backward: accumulate them, compute their global norm, and clip them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.parallel.collectives import summed
from slapo_zoo.parallel.compat import new_group
from slapo_zoo.parallel.local_tensors import held_here, is_divided, rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS, RankPlan, TensorPlan

NORM_ROW = 4096  # elements


@contextmanager
def only_new(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which `.grad` of each parameter is None at first; on exit the new gradients are added to the earlier ones.

    When the body raises, the earlier gradients are restored and the new ones are dropped.
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
            new, p.grad = p.grad, grad
            if new is not None:
                grad.add_(new)


def sum_over_tp(named: Iterable[tuple[str, nn.Parameter]], plan: RankPlan) -> list[Any]:
    """Register hooks that all-reduce gradients over tp ranks in each backward; return the hooks' handles (`remove()`).

    `plan` says which parameters get one: those that a `sum_gradient` of the schedule names, and shards that several
    tp ranks hold (KV heads). All ranks must call this function, because it makes process groups. `named` are this
    rank's (name, parameter) pairs.
    """
    mesh, handles = plan.mesh, []
    groups = {ranks: new_group(list(ranks)) for ranks in plan.groups()} if mesh.tp > 1 else {}
    for name, p in named:
        row = plan.of(name)
        for one in row.sums(False, REPLICAS, PARTIAL) if row and mesh.tp > 1 else ():
            group = groups.get(one.ranks(mesh)) if one.parts else mesh.group(one.mesh_dim)
            trains = p.requires_grad
            p.requires_grad_()  # register_hook needs it; a frozen one may be trained later
            handles += [p.register_hook(partial(summed, group=group))] if group else []
            p.requires_grad_(trains)
    return handles


def global_norm(named: Iterable[tuple[str, nn.Parameter]], plan: RankPlan) -> Tensor:
    """Return the 2-norm of the gradients of the unsharded model, as one process would compute it.

    `named` are names and local parameters of this rank; `plan` says how they are sharded. All ranks call this:
    squares of the gradients are all-reduced over tp (if sharded over tp), dp (if sharded by ZeRO), and pp.
    """
    divided, whole, device, dtype = [], [], torch.device("cpu"), torch.float32
    named, mesh = list(named), plan.mesh
    any_divided_over_dp = any(is_divided(p) for _, p in named)
    for name, p in named:
        dtype, device = torch.promote_types(dtype, p.dtype), p.device
        if p.grad is None or not plan.owns(name):
            continue
        grad, row = held_here(p.grad), plan.of(name)
        copies = _copies(p, row, mesh) if any_divided_over_dp else 1
        is_sharded = row is not None and row.placement is not None
        copies *= row.replicas(mesh) if row is not None and is_sharded else 1
        (divided if is_sharded else whole).append((grad, copies))
    squares = torch.stack([_square(divided, device), _square(whole, device)])
    if any_divided_over_dp:
        dist.all_reduce(squares, group=mesh.group("loss"))
    if mesh.tp > 1:
        local = squares[:1].clone()
        dist.all_reduce(local, group=mesh.group("tp"))
        squares = torch.cat([local, squares[1:]])
    total = squares.sum()
    if mesh.pp > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    return total.sqrt().to(dtype)


def _copies(p: Tensor, row: TensorPlan | None, mesh: Mesh) -> int:
    """Return the number of dp and cp ranks that hold the same elements of the gradient of `p`; 1 for FSDP2's DTensors.
    `row` says how the parameter is sharded; None if the plan does not name the parameter.
    """
    if hasattr(p, "full_tensor"):  # FSDP2 divides over all of them
        return 1
    return mesh.size("loss") // (row.row_shards if row and rows_of(p) else 1)


def scale(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of `parameters` in place: their global norm, which is `norm`, becomes at most `max_norm`."""
    if not any(is_divided(p) for p in parameters):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils does it
    for p in parameters:
        if p.grad is not None:
            held_here(p.grad).mul_(factor.to(p.grad.device))


def _square(grads: list[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """Return the sum of the squares of all gradients as a float64 scalar on their `device`. `grads` are pairs of a
    gradient and the number of ranks that add this gradient to the norm, by which its squares are divided.

    Norms of short pieces of each gradient are computed first: on a CPU a single float32 norm over 23 million
    elements is off by a thousandth.
    """
    pairs = ((norm, n) for grad, n in grads for norm in _row_norms(grad))
    norms = [norm if n == 1 else norm / n**0.5 for norm, n in pairs]
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
