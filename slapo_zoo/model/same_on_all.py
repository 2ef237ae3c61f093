"""Check before the first step that all ranks have the same arguments, schedule and weights.

torch's DDP compares shapes and broadcasts rank 0's state. Here nothing is broadcast: an error names the ranks that
differ, and the difference.
"""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.digests import digest, unlike
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.zoo.options import LoaderOptions

SAMPLES = 4  # values of each tensor that are compared
# Arguments that may differ: each rank has its own device; the schedule is compared after it was applied.
OWN = ("device", "schedule", "target_options")


def facts_of(config: Any, mesh: Mesh, options: LoaderOptions) -> dict[str, str]:
    """Return {name: value as text} of the load's arguments, software versions and config fields that ranks must share."""
    found = software() | {"Python": platform.python_version()}
    asked = {name: value for name, value in vars(options).items() if name not in OWN}
    found |= {name: getattr(v, "__name__", None) or repr(v) for name, v in asked.items()}
    found |= {name: str(size) for name, size in mesh.sizes.items()}
    fields = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}  # paths
    return found | {f"config.{name}": repr(value) for name, value in fields.items()}


def require_same_facts(what: str, mesh: Mesh, facts: Mapping[str, str]) -> None:
    """Raise MeshError on all ranks if a rank loads with other arguments, versions or config; a collective call.

    Args:
        what: name of the running call ("from_pretrained"), for errors.
        mesh: mesh of all ranks.
        facts: result of `facts_of` on this rank: name of an argument, version or config field --> value as text.
    """
    if unlike(together(mesh, what, lambda: digest(sorted(facts.items())))):
        found = together(mesh, what, lambda: dict(facts))
        rank, name = _first_difference(found)
        mine, theirs = (found[r].get(name, "nothing") for r in (rank, 0))
        problem = f"rank {rank} has {mine:.60}, rank 0 has {theirs:.60}"
        hint = "start all ranks with the same arguments, files and versions"
        raise MeshError(what, name, problem, hint)


def _first_difference(found: Sequence[Mapping[str, str]]) -> tuple[int, str]:
    rank = next(rank for rank, one in enumerate(found) if one != found[0])
    names = [*found[0], *(name for name in found[rank] if name not in found[0])]
    return rank, next(name for name in names if found[0].get(name) != found[rank].get(name))


def require_same_weights(
    what: str, mesh: Mesh, tensors: Mapping[str, Tensor], specs: Sequence[TensorSpec], history: str,
    dp_shard: int = 1,
) -> None:  # fmt: skip
    """Raise MeshError on all ranks if schedules, or four sampled values of replicas of a tensor, differ; a collective.

    Args:
        what: name of the running call ("from_pretrained"), for errors.
        mesh: mesh of all ranks.
        tensors: name --> parameter of this rank.
        specs: name and sharding of each tensor of the model; an unsharded one must be equal on all ranks of a stage.
        history: digest of this rank's schedule.
        dp_shard: number of dp ranks over which ZeRO shards rows; 1 without ZeRO.
    """
    if mesh.world_size == 1:
        return
    replicated = {spec.name for spec in specs if spec.placement is None}
    samples = _samples(tensors)
    parts = [{n: s for n, s in samples.items() if n in replicated}, samples]
    digests = [digest(sorted(part.items())) for part in parts]
    found = together(mesh, what, lambda: (history, *digests))
    if differ := unlike([program for program, *_ in found]):
        problem = f"the schedule of ranks {differ} differs from rank 0's"
        hint = "pass the same schedule= on all ranks, and kernels= by name where devices differ"
        raise MeshError(what, "schedule", problem, hint)
    for rank in range(mesh.world_size):
        at = mesh.seen_by(rank)
        like = at.coord("loss") % dp_shard
        for which, peer in ((1, at.at(tp=0, loss=like)), (2, at.at(loss=like))):
            if found[rank][which] != found[peer][which]:
                _raise_different(what, mesh, parts[which - 1], rank, peer)


def _raise_different(
    what: str, mesh: Mesh, samples: Mapping[str, Any], rank: int, peer: int
) -> None:
    every = together(mesh, what, lambda: samples if mesh.rank in (rank, peer) else {})
    names = [name for name in every[peer] if repr(every[rank].get(name)) != repr(every[peer][name])]
    name = min(names, default="parameters")
    values = [every[one].get(name, "nothing") for one in (rank, peer)]
    problem = f"rank {rank} has other values ({values[0]}) than rank {peer} ({values[1]})"
    hint = "load the same files on all ranks: one of the two may read another or an older copy"
    raise MeshError(what, name, problem, hint)


def _samples(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return {name: four elements of the tensor, spread evenly from first to last}, without empty tensors."""
    picked = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        if count := flat.numel():
            places = torch.arange(SAMPLES, device=flat.device) * (count - 1) // (SAMPLES - 1)
            picked[name] = flat[places].double()
    if not picked:
        return {}
    values = torch.stack([*picked.values()]).tolist()  # one wait for the device
    return dict(zip(picked, values, strict=True))
