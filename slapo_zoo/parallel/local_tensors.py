"""Cutting of shards from unsharded tensors, and records of the rows (slices of axis 0) that a dp rank holds under ZeRO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, TensorSpec


class Rows(NamedTuple):
    """Range of rows, the indices first to first + count - 1 of a tensor's axis 0, that this dp rank holds under ZeRO.

    Args:
        first: index of the first row in the tensor that is unsharded over dp.
        count: number of rows.
        writes: True if this rank writes the rows to files; of ranks with the same rows only one does.
    """

    first: int
    count: int
    writes: bool = True


@dataclass
class RowsOfRank:
    """Rule by which ZeRO shards tensors over dp ranks: each rank holds some rows (a slice of axis 0).

    Args:
        size: number of ranks over which rows are sharded.
        rank: this rank's index among them.
        writes: True if this rank writes its rows to files; of ranks with the same rows only one does.
    """

    size: int
    rank: int
    writes: bool = True

    def rows(self, shape: Sequence[int]) -> int:
        """Return the number of rows per rank, ceil(shape[0] / size); the last ranks may hold fewer."""
        return -(-shape[0] // self.size)

    def mine(self, shape: Sequence[int]) -> Rows:
        """Return which rows this rank keeps of a tensor with the unsharded `shape`."""
        rows = self.rows(shape)
        first = min(self.rank * rows, shape[0])
        return Rows(first, min(rows, shape[0] - first), self.writes)

    def part(self, whole: Tensor) -> Tensor:
        """Return a copy of the rows that this rank keeps of an unsharded tensor."""
        first, count, _ = self.mine(whole.shape)
        return whole.narrow(0, first, count).clone()

    def note(self, part: Any, shape: Sequence[int]) -> Any:
        """Return `part`, with its attribute `dp_rows` set to this rank's rows of a tensor of unsharded `shape`."""
        part.dp_rows = self.mine(shape)
        return part

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of this rank's slice, along axis 0, of the still unsharded `parameter`; () for a scalar."""
        shape = tuple(parameter.shape)
        return (self.mine(shape).count, *shape[1:]) if shape else shape


def rows_of(tensor: Any) -> Rows | None:
    """Return which rows (slice of axis 0) this dp rank holds of a tensor; None where the tensor is not sharded over dp.
    The result is an attribute of `tensor`, a parameter or an optimizer state. The model's RankPlan tells the unsharded
    shape and which ranks hold the other rows.
    """
    return getattr(tensor, "dp_rows", None)


def marked_as(tensor: Any, part: Any, first: int | None = None) -> Any:
    """Return `tensor`; if `part`, a parameter's shard, is sharded over dp by ZeRO, first store in the attribute
    `tensor.dp_rows`, which `rows_of` returns, which rows (slice of axis 0) of the unsharded parameter `tensor` holds.
    `tensor` is a slice of `part`, or an optimizer state like it. Its first row is row `first` of the unsharded
    parameter; None: the first row of `part`.
    """
    if (rows := rows_of(part)) is not None:
        tensor.dp_rows = Rows(rows.first if first is None else first, len(tensor), rows.writes)
    return tensor


def runs_within(runs: Sequence[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """Skip the first `first` indices in the ranges `runs`, (start, stop); return ranges of the next `count` indices.

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
    """Return a copy of the shard of an unsharded tensor that rank r of n holds, with zeros for
    padding. `placement` says along which axis and how the tensor is sharded.
    """
    axis = placement.axis
    if tensor.is_meta or hasattr(tensor, "fake_mode"):  # only its shape is of interest
        return tensor.new_empty(placement.local_shape(tuple(tensor.shape), n, r))
    parts = [tensor.narrow(axis, a, b - a) for a, b in placement.runs(tensor.shape[axis], n, r)]
    missing = placement.local_size(tensor.shape[axis], n, r) - sum(p.shape[axis] for p in parts)
    if missing:
        shape = list(tensor.shape)
        shape[axis] = missing
        parts.append(tensor.new_zeros(shape))
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0].clone()


def part_of(full: Tensor, spec: TensorSpec | None, mesh: Mesh) -> Tensor:
    """Return this rank's shard of the unsharded tensor `full`; `full` itself if `spec` is None or shards no axis."""
    cut = spec and spec.placement
    return local_part(full, cut, *mesh.place(cut.mesh_dim)) if cut else full


def put_part(full: Tensor, part: Tensor, placement: Placement, n: int, r: int) -> Tensor:
    """Copy the shard `part` of rank r of n, without its padding, into the unsharded tensor `full`;
    return `full`. `placement` says along which axis and how the tensor is sharded.
    """
    axis, offset = placement.axis, 0
    for start, stop in placement.runs(full.shape[axis], n, r):
        full.narrow(axis, start, stop - start).copy_(part.narrow(axis, offset, stop - start))
        offset += stop - start
    return full


def is_divided(tensor: Tensor | None) -> bool:
    """Return whether a tensor is sharded over dp, by FSDP2 (then it is a DTensor) or by this package; False for None."""
    return hasattr(tensor, "full_tensor") or rows_of(tensor) is not None


def held_here(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, which shares its memory; any other tensor is returned unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole_over_dp(tensor: Tensor) -> Tensor:
    """Return an FSDP2 tensor gathered over dp (a collective call); any other tensor is returned unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def require_indices(inside: Tensor, what: str, size: int) -> None:
    """Raise RuntimeError unless all of `inside` is True; on a GPU a later CUDA call raises, as the host does not wait.

    Args:
        inside: bool per index, True if the index lies in 0..size-1 of the unsharded axis.
        what: name of the indices for the message, e.g. "labels".
        size: length of the unsharded axis.
    """
    hint = "use the tokenizer of this model, or a model with a larger vocabulary"
    # On one line: torch.compile writes it into C++ as it is.
    problem = f"{what}: found one beyond 0..{size - 1}; hint: {hint}"
    torch._assert_async(inside.all(), problem)  # pyright: ignore[reportPrivateImportUsage]
