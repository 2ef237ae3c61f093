"""Gathering of local tensors into unsharded ones on rank 0: for tests and small models."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.parallel.local_tensors import marked_as, put_part
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import without_peft


def local_tensors(
    model: Any, specs: Sequence[TensorSpec], mesh: Mesh, grads: bool = False, rows: bool = False
) -> dict[str, Tensor]:
    """Return {name: this rank's tp shard} of those tensors of a loaded `model` that `specs` lists and this rank's stage
    owns; with `grads`, of their gradients (zeros for a missing one). Under ZeRO they are gathered over dp. With `rows`
    (then without `grads`) nothing is gathered: under ZeRO a value is only this dp rank's slice of axis 0 of the tp
    shard, and `local_tensors.rows_of(value)` returns which slice.
    """
    engine = model._slapo.data_parallel
    found = engine.kept(model) if rows else engine.tensors(model, grads)
    found = {without_peft(name): tensor for name, tensor in found.items()}
    local = {}
    for spec in specs:
        if spec.stage != mesh.coord("pp") or spec.name not in found:
            continue
        local[spec.name] = marked_as(found[spec.name].detach(), found[spec.name])
    return local


def gather(
    local: Mapping[str, Tensor], specs: Sequence[TensorSpec], mesh: Mesh, group: Any = None
) -> dict[str, Tensor]:
    """Gather shards from all ranks; return {name: unsharded CPU tensor} on rank 0, {} on others. A collective call.

    Args:
        local: name --> this rank's tp shard, which is not sharded over dp.
        specs: name, unsharded shape and sharding of each tensor.
        mesh: mesh of the model, with this rank's coordinates.
        group: process group of all ranks; None: the default group. With nccl the GPU of rank 0 holds all shards.
    """
    mine = {name: tensor.to("cpu", copy=True) for name, tensor in local.items()}
    if mesh.world_size == 1:
        everyone = [mine]
    else:
        sent = {name: _packed(tensor) for name, tensor in mine.items() if mesh.coord("loss") == 0}
        found: Any = [{} for _ in range(mesh.world_size)] if mesh.rank == 0 else None
        dist.gather_object(sent, found, group=group)
        if found is None:
            return {}
        everyone = [{name: torch.from_numpy(data).view(dtype).reshape(shape)
                     for name, (data, dtype, shape) in rank.items()} for rank in found]  # fmt: skip
    return {spec.name: _assemble(spec, everyone, mesh) for spec in specs
            if any(spec.name in tensors for tensors in everyone)}  # fmt: skip


def _packed(tensor: Tensor) -> tuple[Any, torch.dtype, torch.Size]:
    """Return a CPU tensor as (its bytes as a NumPy array, dtype, shape); torch's own pickles take ten times as long."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _assemble(spec: TensorSpec, everyone: list[dict[str, Tensor]], mesh: Mesh) -> Tensor:
    ranks = [mesh.at(tp=tp, loss=0, pp=spec.stage) for tp in range(mesh.tp)]
    if spec.placement is None:
        return everyone[ranks[0]][spec.name]
    full = torch.empty(spec.shape, dtype=everyone[ranks[0]][spec.name].dtype, device="cpu")
    for r, rank in enumerate(ranks):
        put_part(full, everyone[rank][spec.name], spec.placement, mesh.tp, r)
    return full
