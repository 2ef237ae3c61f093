"""Cutting a full tensor by its placement, and indices into one of which a rank holds a part."""

import torch
from torch import Tensor

from slapo_zoo.parallel.placement import Placement


def local_part(tensor: Tensor, placement: Placement, n: int, r: int) -> Tensor:
    """This rank's elements of a full tensor, padding included."""
    axis = placement.axis
    if tensor.is_meta:  # only its shape is of interest
        return tensor.new_empty(placement.local_shape(tuple(tensor.shape), n, r))
    parts = [tensor.narrow(axis, a, b - a) for a, b in placement.runs(tensor.shape[axis], n, r)]
    missing = placement.local_size(tensor.shape[axis], n, r) - sum(p.shape[axis] for p in parts)
    if missing:
        shape = list(tensor.shape)
        shape[axis] = missing
        parts.append(tensor.new_zeros(shape))
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0].clone()


def is_divided(tensor: Tensor) -> bool:
    """Whether an engine divides a tensor over dp (FSDP2's parameters are DTensors)."""
    return hasattr(tensor, "full_tensor")


def held_here(tensor: Tensor) -> Tensor:
    """The elements that this rank holds, in the tensor's own memory."""
    return tensor.to_local() if is_divided(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole_over_dp(tensor: Tensor) -> Tensor:
    """All elements; a collective call over dp where an engine divides the tensor."""
    return tensor.full_tensor() if is_divided(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def require_indices(inside: Tensor, what: str, size: int) -> None:
    """Raise unless all are True, as torch does for a whole tensor; on a GPU without a wait.

    Args:
        inside: whether each index lies in the whole tensor: beyond this rank's part is no error.
        what: the indices, as the message names them.
        size: of the whole axis.
    """
    hint = "do the tokenizer and the model have the same vocabulary?"
    # On one line: torch.compile writes it into C++ as it is.
    problem = f"{what}: found one beyond 0..{size - 1}; hint: {hint}"
    torch._assert_async(inside.all(), problem)  # pyright: ignore[reportPrivateImportUsage]
