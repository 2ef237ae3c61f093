"""Slices of each tensor in the checkpoint files that a rank reads: those of its shard, and no others."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from slapo_zoo.parallel.local_tensors import runs_within
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.load_memory import Target

AHEAD = 256 << 20  # bytes that the kernel may fetch before they are copied


def slices_of_rank(target: Target, view: Tensor, mesh: Mesh) -> list[Tensor]:
    """Return the slices of `view`, an unsharded tensor in a mapped file, that make up this rank's tensor, in order."""
    placement, rows = target.placement, target.rows
    if placement is None:
        return [view if rows is None else view.narrow(0, *rows[:2])]
    n, r = mesh.size(placement.mesh_dim), mesh.coord(placement.mesh_dim)
    runs = placement.runs(view.shape[placement.axis], n, r)
    if rows is not None and placement.axis == 0:
        runs = runs_within(runs, *rows[:2])
    elif rows is not None:
        view = view.narrow(0, *rows[:2])
    return [view.narrow(placement.axis, start, stop - start) for start, stop in runs]


def read_ahead(
    order: Sequence[str], targets: Mapping[str, Target], folder: CheckpointFolder,
    source: Mapping[str, str], mesh: Mesh,
) -> Iterator[tuple[str, list[Tensor]]]:  # fmt: skip
    """Yield (name, slices in the mapped file) of the names in `order`, the order in the file, while
    the operating system prefetches the next slices. `source` maps names to keys.
    """
    waiting: deque[tuple[str, list[Tensor]]] = deque()
    asked = 0
    for name in order:
        view = folder.view(source[name])
        parts = [part for part in slices_of_rank(targets[name], view, mesh) if part.numel()]
        for part in parts:
            folder.read_ahead(source[name], part.data_ptr() - view.data_ptr(), _extent(part))
        waiting.append((name, parts))
        asked += sum(part.nbytes for part in parts)
        while asked > AHEAD:
            asked -= sum(part.nbytes for part in waiting[0][1])
            yield waiting.popleft()
    yield from waiting


def _extent(part: Tensor) -> int:
    """Return the bytes from the first element of a strided part to its last."""
    steps = zip(part.shape, part.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * part.itemsize
