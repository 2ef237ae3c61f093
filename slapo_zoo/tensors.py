"""Cutting a full tensor by its placement."""

import torch
from torch import Tensor

from slapo_zoo.placement import Placement


def local_part(tensor: Tensor, placement: Placement, n: int, r: int) -> Tensor:
    """This rank's elements of a full tensor, padding included."""
    axis = placement.axis
    parts = [tensor.narrow(axis, a, b - a) for a, b in placement.runs(tensor.shape[axis], n, r)]
    missing = placement.local_size(tensor.shape[axis], n, r) - sum(p.shape[axis] for p in parts)
    if missing:
        shape = list(tensor.shape)
        shape[axis] = missing
        parts.append(tensor.new_zeros(shape))
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0].clone()
