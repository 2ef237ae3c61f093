"""Steps that succeed on all ranks or fail on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from slapo_zoo.errors import MeshError, RankError, SlapoError, agreed
from slapo_zoo.parallel.digests import unlike
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.killed_rank import lost_peer, peer_error
from slapo_zoo.parallel.ranks.patience import gather_objects, patient_group

T = TypeVar("T")


def together(mesh: Mesh, what: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank, wait for all, and return the results of all ranks, by rank.

    A collective call. If the action raised, its rank raises that error and all others a RankError
    that names the first failed rank; if a rank is lost, the others raise a RankError too. Without a process
    group the mesh must have one rank.

    Args:
        mesh: mesh of all ranks.
        what: name of the step for error messages.
        action: function without arguments; its result must be picklable.
    """
    error, result = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    try:
        reports = _exchange(mesh, what, (what, result, None if error is None else _portable(error)))
    except SlapoError:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise agreed(error)
    for rank, (_, _, failure) in enumerate(reports):
        if failure is not None:
            raise RankError(f"rank {rank}", what, *failure)
    return [outcome for _, outcome, _ in reports]


def once_for_all(what: str, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on all ranks; if it fails, all ranks raise. A
    collective call. `what` names the step in errors; the result must be picklable.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return action()
    found: list[Any] = [None]
    together(Mesh(dp=size, rank=dist.get_rank()), what,
             lambda: None if dist.get_rank() else found.__setitem__(0, action()))  # fmt: skip
    dist.broadcast_object_list(found, 0, group=patient_group())
    return found[0]


def _portable(error: Exception) -> tuple[str, str]:
    """Return an error as two texts, (what went wrong, what to do), since not every exception can be pickled."""
    if isinstance(error, SlapoError):
        parts = [str(part) for part in (error.where, error.what, error.problem) if str(part)]
        return ": ".join(parts), error.hint
    return f"{type(error).__name__}: {error}", "see the output of that rank"


def _exchange(mesh: Mesh, what: str, report: Any) -> list[Any]:
    if mesh.world_size == 1:
        return [report]
    size = dist.get_world_size() if dist.is_initialized() else 0
    if size != mesh.world_size:
        found, count = f"{size} processes" if size else "no process group", mesh.world_size
        problem = f"found {found}, expected {'*'.join(mesh.sizes)} = {count} processes"
        hint = f"start {count} processes, e.g. by torchrun --nproc-per-node, or pass other sizes of the mesh"
        raise MeshError(what, mesh, problem, hint)
    try:
        reports = gather_objects(what, report)
    except RankError:
        raise
    except RuntimeError as error:
        raise peer_error() or lost_peer(error, what) from error
    if differ := unlike([step for step, *_ in reports]):
        problem = f"rank 0 is at {reports[0][0]}, rank {differ[0]} at {reports[differ[0]][0]}"
        hint = "make the same calls in the same order on all ranks, without `if rank == 0:`"
        raise agreed(RankError("ranks", what, problem, hint))
    return reports
