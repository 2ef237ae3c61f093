"""Checks that all ranks of a dp replica were fed the same batch, and that dp replicas were fed different ones."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel.digests import unlike
from slapo_zoo.parallel.mesh import Mesh

INTERVAL = 16  # training steps from one check to the next; the first step is checked
SAMPLE = 1 << 16  # elements of one tensor that count: a batch of images is not read twice


class InputWarning(UserWarning):
    """Warning that dp ranks were fed the same rows."""


def check_batch(
    mesh: Mesh, batch: Mapping[str, Tensor], step: int, interval: int, hooks: Callable[[], int] = int
) -> None:  # fmt: skip
    """Compare a hash of the batch over all ranks, by one all-gather of 16 bytes.

    All ranks raise MeshError if ranks that differ only in tp, pp or cp were fed different batches, whose rows a step
    would mix. Rank 0 warns if dp replicas were fed the same batch.

    Args:
        mesh: mesh of all ranks.
        batch: name --> tensor of the batch.
        step: number of this training step, from 1.
        interval: training steps from one check to the next; 0 never checks.
        hooks: function that counts the gradient hooks of the user on sharded parameters of this rank. Ranks must have
            equally many (else MeshError), since each such hook gathers a gradient from all ranks.
    """
    if mesh.world_size == 1 or interval < 1 or (step - 1) % interval:
        return
    mine = digest(batch)
    mine = torch.stack([mine, torch.full_like(mine, hooks())])
    found, hooked = of_all(mine).t().tolist()
    _same_hooks(mesh, hooked)
    _same_for_peers(mesh, found)
    _warn_of_equal_replicas(mesh, found)


def check_peers(
    mesh: Mesh, batch: Mapping[str, object], step: int, interval: int, draws: int, dims: Sequence[str] = ("tp", "cp")
) -> None:  # fmt: skip
    """Raise MeshError if ranks along `dims` got different batches, or would draw different dropout masks, in a call
    of the model in the user's own loop (without `train_step`).

    Args:
        mesh: mesh of all ranks.
        batch: name --> value of the batch.
        step: number of this call of the model, from 1.
        interval: calls from one check to the next; 0 never checks.
        draws: number of the model's forwards so far on this rank, which seeds its dropout masks.
        dims: dims of the mesh whose ranks have to get the same batch.
    """
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    shared = [mesh_dim for mesh_dim in dims if mesh.size(mesh_dim) > 1]
    if not shared or not tensors or interval < 1 or (step - 1) % interval:
        return
    mine = digest(tensors) + draws
    for mesh_dim in shared:
        found = of_all(mine, mesh.group(mesh_dim)).tolist()
        if differ := [mesh.at(**{mesh_dim: r}) for r in unlike(found)]:
            raise _unlike("forward", differ, mesh.at(**{mesh_dim: 0}))


def check_trained_inputs(mesh: Mesh, parameters: Sequence[Tensor]) -> None:
    """Raise MeshError on all ranks if `parameters`, trained ones that the model's inputs are computed from (a soft
    prompt), differ between any two ranks in a hash of a sample of their values.
    """
    if mesh.world_size == 1:
        return
    mine = digest({str(number): p for number, p in enumerate(parameters)})
    found = of_all(mine).tolist()
    if differ := unlike(found):
        shapes = ", ".join(str(list(p.shape)) for p in parameters[:3])
        problem = f"on ranks {differ} the trained input {shapes} has other values than on rank 0"
        hint = "make the parameter after the same torch.manual_seed on every rank, or dist.broadcast(p.data, 0)"
        raise MeshError("forward", "a trained input", problem, hint)


def of_all(mine: Tensor, group: Any = None) -> Tensor:
    """All-gather the tensor `mine` of each rank of a process group (None: all ranks) into one tensor [ranks, ...]."""
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, mine, group=group)
    return torch.stack(each)


def digest(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a 64-bit hash of the sizes and of a sample of the values of a batch, as a scalar on the batch's device."""
    total = torch.zeros((), dtype=torch.int64, device=next(iter(batch.values())).device)
    for number, name in enumerate(sorted(batch), start=1):
        x = batch[name]
        flat = x.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLE)]
        if flat.is_floating_point():
            flat = flat.double().view(torch.int64)
        flat = flat.long()
        place = torch.arange(flat.numel(), device=flat.device)
        mixed = (flat + 1) * (place * 0x2545F4914F6CDD1D + 0x1E3779B97F4A7C15)  # int64 wraps around
        mixed = mixed ^ (mixed >> 29)
        total = total * 31 + mixed.sum() * number + x.numel()
    return total


def _same_for_peers(mesh: Mesh, found: Sequence[int]) -> None:
    for copy in range(mesh.size("batch")):
        ranks = mesh.ranks(batch=copy)
        differ = [rank for rank in ranks if found[rank] != found[ranks[0]]]
        if differ:
            raise _unlike("train_step", differ, ranks[0])


def _same_hooks(mesh: Mesh, found: Sequence[int]) -> None:
    """Raise MeshError if ranks of a stage have different numbers of gradient hooks; `found` has the number of each rank."""
    for stage in range(mesh.pp):
        ranks = mesh.ranks(pp=stage)
        if len(numbers := {found[rank] for rank in ranks}) > 1:
            problem = f"the ranks of stage {stage} have {sorted(numbers)} gradient hooks on sharded parameters"
            hint = "register the same hooks on all ranks: each hook gathers the gradient from all"
            raise MeshError("train_step", "hooks on parameters", problem, hint)


def _unlike(where: str, differ: Sequence[int], first: int) -> MeshError:
    hint = (
        "feed the same rows to ranks that differ only in tp, pp or cp: choose them by model.mesh.coord('dp'); "
        "set torch's seed on all ranks or on none; model.input_check_interval = 0 switches this check off"
    )
    problem = f"ranks {list(differ)} were fed another batch than rank {first}"
    problem += ", or have called the model more or less often" if where == "forward" else ""
    return MeshError(where, "batch", problem, hint)


def _warn_of_equal_replicas(mesh: Mesh, found: Sequence[int]) -> None:
    copies = [found[mesh.ranks(batch=copy)[0]] for copy in range(mesh.size("batch"))]
    if len(set(copies)) < len(copies) and mesh.rank == 0:
        warnings.warn(
            "data-parallel ranks are fed the same rows: choose them by model.mesh.coord('dp'); "
            "model.input_check_interval = 0 switches this check off",
            InputWarning,
            stacklevel=6,
        )
