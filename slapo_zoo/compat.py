"""Names that moved between the torch releases we support (2.10 to 2.13)."""

from typing import Any

import torch.distributed as dist

# 2.13 deprecates the old names with a warning per call; 2.11 lacks the new ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
