"""Names that moved between the torch releases we support (2.10 to 2.13), or that are not public."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# 2.13 deprecates the old names with a warning per call; 2.11 lacks the new ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def new_group(ranks: Sequence[int]) -> Any:
    """A group that waits as long as the whole one; torch's default is 30 minutes.

    A collective call of all ranks. A rank that hangs or dies would stop its peers only then.
    """
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    world: Any = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    return dist.new_group(ranks, timeout=world._get_backend(torch.device(kind)).options._timeout)
