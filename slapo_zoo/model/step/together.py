"""Check that all ranks that compute a model call it: a rank that evaluates alone gets an error, not a hang."""

from typing import Any

import torch

from slapo_zoo.errors import MeshError
from slapo_zoo.model.dp.dp_shard import Sharded
from slapo_zoo.model.gradients.step_guard import ALWAYS
from slapo_zoo.parallel.ranks.heartbeat import names_of
from slapo_zoo.parallel.ranks.patience import meet
from slapo_zoo.parallel.ranks.process_group import rank_guard


def require_together(model: Any) -> None:
    """Raise MeshError where some ranks that a call in eval mode needs have gone on without it.

    Ranks meet in the first ALWAYS calls, and then once in `input_check_interval`.
    """
    runtime, interval = model._slapo, model.input_check_interval
    if model.training or torch.compiler.is_compiling() or not interval:
        return
    runtime.evaluated += 1
    if runtime.evaluated > ALWAYS and runtime.evaluated % interval:
        return
    ranks = computing_with(model)
    if len(ranks) == 1:
        return
    with rank_guard("forward"):
        if gone := meet("forward", ranks):
            problem = f"{names_of(gone)} went on without, and each rank computes a part of it"
            hint = "call it on all ranks, each gets the whole output, and print or write on one"
            raise MeshError("forward", "a model that is called on some ranks", problem, hint)


def computing_with(model: Any) -> list[int]:
    """Return the ranks with which a forward of a model communicates, this one included."""
    mesh, engine = model.mesh, model._slapo.data_parallel
    size = engine.shards.size if isinstance(engine, Sharded) else 1
    sharing = mesh.coord("loss") // size  # which group of ranks that divide parameters
    return [r for r in range(mesh.world_size) if mesh.coord("loss", r) // size == sharing]
