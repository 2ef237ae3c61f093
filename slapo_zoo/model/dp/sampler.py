"""Samples that each rank reads: the same on ranks of one dp replica, different ones on different replicas."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.compat import group_device
from slapo_zoo.parallel.mesh import Mesh

NO_BATCH = "found None on the first rank of a dp replica, whose batch the other ranks receive"
HINT = "pass the batch on the ranks whose tp, cp and pp coordinates are 0; others may pass None"


class MeshSampler:
    """Batch sampler for a DataLoader: for every step it yields a list of the sample indices that this dp rank reads.

    The order depends on seed and epoch only, so ranks need no communication. In each step the dp ranks
    together read the `batch_size` rows that one process would read; an incomplete last batch is dropped.

    Args:
        dataset: the dataset of the DataLoader, or anything with its length.
        mesh: mesh of the model.
        batch_size: rows of a step over all dp ranks.
        shuffle: permute the samples in every epoch.
        seed: seed of the permutations.
    """

    def __init__(
        self, dataset: Sized, mesh: Mesh, batch_size: int, shuffle: bool = True, seed: int = 0
    ):
        if batch_size < 1 or batch_size % mesh.size("batch"):
            problem = f"found {batch_size}, expected a multiple of {mesh.named('batch')}={mesh.size('batch')}"
            hint = "pass the number of rows that all dp ranks together read in a step"
            raise SlapoError("MeshSampler", "batch_size", problem, hint)
        self.size, self.mesh, self.batch_size = len(dataset), mesh, batch_size
        if self.size < batch_size:
            problem = f"found {self.size} samples, fewer than one batch of {batch_size}"
            raise SlapoError("MeshSampler", "dataset", problem, "pass a smaller batch_size")
        self.shuffle, self.seed, self.step = shuffle, seed, 0

    def __len__(self) -> int:
        """Return the number of steps of one epoch."""
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's list of sample indices for each remaining step of the epoch; `self.step` counts steps."""
        epoch, turn = divmod(self.step, len(self))
        generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
        shuffled = torch.randperm(self.size, generator=generator).tolist() if self.shuffle else None
        order = shuffled or list(range(self.size))
        rows = self.batch_size // self.mesh.size("batch")
        for number in range(turn, len(self)):
            first = number * self.batch_size + self.mesh.coord("batch") * rows
            self.step += 1
            yield order[first : first + rows]

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """Return the position of the sampler: pass it as `data_position` to `save_checkpoint`.

        Args:
            step: number of steps that were trained; None takes the number of batches yielded, which includes
                those that a DataLoader with workers has prefetched.
        """
        return {"step": self.step if step is None else step, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position that `state_dict` returned as `state`; the number of dp ranks may have changed."""
        if not isinstance(state, Mapping) or {"step", "seed"} - state.keys():
            problem = f"found {state!r:.60}, expected step and seed"
            raise SlapoError(
                "MeshSampler", "load_state_dict", problem, "pass a result of state_dict"
            )
        self.step, self.seed = state["step"], state["seed"]


def broadcast_batch(
    batch: Mapping[str, Any] | None, mesh: Mesh, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Broadcast each dp replica's batch from the replica's first rank to its other ranks; return the batch on all ranks.

    A collective call of all ranks; ranks other than the first of a replica may pass None.

    Args:
        batch: name --> tensor or picklable value; read on the first rank of a replica alone.
        mesh: mesh of the model.
        device: device of the returned tensors, e.g. the model's; None takes the process group's:
            with nccl this rank's GPU.
    """
    device = group_device() if device is None and mesh.world_size > 1 else device
    found = dict(batch) if batch is not None else None
    for mesh_dim, later in (("tp", ("cp", "pp")), ("cp", ("pp",)), ("pp", ())):
        if mesh.size(mesh_dim) > 1 and not any(mesh.coord(each) for each in later):
            found = _broadcast(found, mesh, mesh_dim, device)
    if found is None:
        raise SlapoError("broadcast_batch", "batch", NO_BATCH, HINT)
    return found


def _broadcast(
    batch: dict[str, Any] | None, mesh: Mesh, mesh_dim: str, device: torch.device | str | None
) -> dict[str, Any]:
    """Broadcast a batch over one mesh dim ("tp", "cp" or "pp") from the rank of coordinate 0; return it on all ranks.

    `batch` is read on that rank alone; `device` is that of the returned tensors, None: the process group's.
    """
    first, group = mesh.at(**{mesh_dim: 0}), mesh.group(mesh_dim)
    is_first = mesh.rank == first
    shapes: list[Any] = [None]
    if is_first and batch is not None:
        shapes = [{k: (v.shape, v.dtype) if isinstance(v, Tensor) else (None, v) for k, v in batch.items()}]  # fmt: skip
    dist.broadcast_object_list(shapes, first, group=group)
    if shapes[0] is None:
        raise SlapoError("broadcast_batch", "batch", NO_BATCH, HINT)
    mine: dict[str, Any] = {}
    for name, (shape, dtype) in shapes[0].items():
        if shape is None:
            mine[name] = dtype
            continue
        mine[name] = torch.empty(shape, dtype=dtype, device=device)
        if is_first and batch is not None:
            mine[name] = batch[name].to(mine[name].device).contiguous()
        dist.broadcast(mine[name], first, group=group)
    return mine
