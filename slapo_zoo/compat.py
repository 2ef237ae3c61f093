"""Names that moved between the torch releases we support (2.10 to 2.13), or that are not public."""

from typing import Any

import torch
import torch.distributed as dist

# 2.13 deprecates the old names with a warning per call; 2.11 lacks the new ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def inherit_timeout(group: Any) -> Any:
    """Give a group the timeout of the whole process group: it has torch's default of 30 minutes.

    A rank that hangs would stop its peers only then.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    world: Any = dist.group.WORLD
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
        _set_pg_timeout(world._get_backend(torch.device(kind)).options._timeout, group)
    return group
