"""Cutting a full tensor by its placement, and indices into one of which a rank holds a part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, TensorSpec


class Rows(NamedTuple):
    """Rows of a rank's tensor that it keeps of those that dp ranks divide.

    Args:
        first: row of the tensor that is whole over dp.
        count: of the rows.
        writes: whether this rank writes them; others hold copies.
    """

    first: int
    count: int
    writes: bool = True


@dataclass
class RowsOfRank:
    """The rows that each dp rank keeps of a tensor that dp ranks shard.

    Args:
        size: number of those ranks.
        rank: which of them we are.
        writes: whether our rows go into files; there may be copies of them.
    """

    size: int
    rank: int
    writes: bool = True

    def rows(self, shape: Sequence[int]) -> int:
        """Rows of a part; the last ones may hold fewer, or none."""
        return -(-shape[0] // self.size)

    def mine(self, shape: Sequence[int]) -> Rows:
        """Our rows of a whole tensor."""
        rows = self.rows(shape)
        first = min(self.rank * rows, shape[0])
        return Rows(first, min(rows, shape[0] - first), self.writes)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of an unsharded tensor."""
        first, count, _ = self.mine(whole.shape)
        return whole.narrow(0, first, count).clone()

    def note(self, part: Any, shape: Sequence[int]) -> Any:
        """Mark a parameter as this rank's rows of a tensor of `shape`."""
        part.dp_rows = self.mine(shape)
        return part

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of this rank's rows of a whole parameter; one without an axis stays whole."""
        shape = tuple(parameter.shape)
        return (self.mine(shape).count, *shape[1:]) if shape else shape


def rows_of(tensor: Any) -> Rows | None:
    """Return the rows that a dp rank keeps of a tensor; None where it is unsharded over dp.

    What a file holds of a model may be a piece of a parameter, or a state of an optimizer: so rows go
    with the tensor. Its whole shape, and which ranks have the others, says the plan of the rank.
    """
    return getattr(tensor, "dp_rows", None)


def marked_as(tensor: Any, part: Any, first: int | None = None) -> Any:
    """Mark a tensor as rows of one, from `first` on, where `part` is some rows of one."""
    if (rows := rows_of(part)) is not None:
        tensor.dp_rows = Rows(rows.first if first is None else first, len(tensor), rows.writes)
    return tensor


def runs_within(runs: Sequence[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """Cut the runs to `count` places from `first`, counted along the runs.

    >>> runs_within([(0, 4), (10, 14)], 3, 3)
    [(3, 4), (10, 12)]
    """
    found, at = [], 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(first + count - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return found


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


def part_of(full: Tensor, spec: TensorSpec | None, mesh: Mesh) -> Tensor:
    """This rank's elements of a full tensor; without a placement all of them."""
    cut = spec and spec.placement
    return local_part(full, cut, *mesh.place(cut.mesh_dim)) if cut else full


def put_part(full: Tensor, part: Tensor, placement: Placement, n: int, r: int) -> Tensor:
    """Copy the elements of rank r into their places; padding is left out."""
    axis, offset = placement.axis, 0
    for start, stop in placement.runs(full.shape[axis], n, r):
        full.narrow(axis, start, stop - start).copy_(part.narrow(axis, offset, stop - start))
        offset += stop - start
    return full


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded over dp: by FSDP2, whose tensors are DTensors, or by `dp_shard=`."""
    return hasattr(tensor, "full_tensor") or rows_of(tensor) is not None


def held_here(tensor: Tensor) -> Tensor:
    """The elements that this rank holds, in the tensor's own memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole_over_dp(tensor: Tensor) -> Tensor:
    """All elements; a collective call over dp where an engine divides the tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


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
