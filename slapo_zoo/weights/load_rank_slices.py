"""Read the bytes of a rank's shards, and no others, from mapped checkpoint files directly into its parameters."""

import contextlib
import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.local_tensors import runs_within
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.device_copy import DeviceCopy
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.ledger import byte_progress
from slapo_zoo.weights.load_memory import Target, can_stay_mapped

AHEAD = 256 << 20  # bytes that the kernel may fetch before they are copied
MOST_SHOWN = 20
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # names of dtypes
PIECE = 1 << 22  # elements


def to_dtype(dtype: str | torch.dtype, where: str = "from_pretrained") -> torch.dtype:
    """Return the torch dtype of a name ("bf16" too); SlapoError, by step `where`, if there is none of FLOATS."""
    name = str(dtype).removeprefix("torch.")
    found: Any = getattr(torch, SHORT.get(name, name), None)
    if found not in FLOATS:
        problem = "not a floating torch dtype of 16 to 64 bits"
        raise WeightsError(where, f"dtype={dtype!r}", problem, 'pass e.g. "float32" or "bfloat16"')
    return found


@dataclass(frozen=True)
class LoadOptions:
    """Memory limit, checks and file mapping of a load.

    Args:
        max_memory: most bytes that this rank's tensors may take; None sets no limit.
        check_finite: warn about tensors that contain NaN or infinity.
        map_weights: leave slices in the mapped file when they are contiguous there.
        redraw_mismatched: initialise tensors whose shape in the checkpoint differs, instead of raising.
    """

    max_memory: int | None = None
    check_finite: bool = False
    map_weights: bool = True
    redraw_mismatched: bool = False


def parse_size(size: int | str | None, what: str) -> int | None:
    """Return the number of bytes that a text such as "8GB" means; numbers and None are returned
    unchanged. Errors name the argument `what`.

    >>> parse_size("1.5GB", "max_load_memory"), parse_size(7, "max_load_memory")
    (1500000000, 7)
    """
    if not isinstance(size, str):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
    if match is None:
        problem = f"found {size!r}, expected a number of B, KB, MB, GB or TB"
        raise WeightsError(what, "", problem, 'pass e.g. "8GB"')
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


class Loaded(NamedTuple):
    """Outcome of a load: number of tensors, bytes read or left mapped, names of tensors left in mapped files."""

    tensors: int
    bytes_read: int
    mapped: list[str]


def load_tensors(
    targets: Mapping[str, Target], folder: CheckpointFolder, source: Mapping[str, str], mesh: Mesh,
    check_finite: bool = False,
) -> Loaded:  # fmt: skip
    """Fill every target from its checkpoint key, with zeros for padding; return what was read.

    rewrite:  w [..., size, ...] in the file  -->  tensor [..., local_size(size, n, r), ...] on rank r of n

    All targets are checked first: missing keys, wrong shapes and dtypes are listed in one WeightsError, and no
    tensor is changed. On the CPU only the pages of the slices are read, without an intermediate copy. A
    contiguous slice of the target's dtype stays in the mapped file if the target allows it.

    Args:
        targets: tensor name in the model --> tensor of this rank to fill.
        folder: opened checkpoint.
        source: tensor name in the model --> checkpoint key.
        mesh: mesh with the coordinates of this rank.
        check_finite: warn about tensors that contain NaN or infinity.
    """
    check_targets(targets, folder, source, mesh)
    bytes_read, strange, mapped = 0, [], []
    total = sum(target.tensor.nbytes for target in targets.values())
    order = sorted(targets, key=lambda name: folder.position(source[name]))
    gpu = next((t.tensor.device for t in targets.values() if t.tensor.is_cuda), None)
    staged = DeviceCopy(gpu) if gpu is not None else None
    with torch.no_grad(), byte_progress("loading", total, visible=mesh.rank == 0) as done:
        for name, parts in read_ahead(order, targets, folder, source, mesh):
            target = targets[name]
            if (
                _stays(target, parts)
                and (piece := folder.piece(source[name], parts[0])) is not None
            ):
                target.tensor.data = piece
                mapped.append(name)
            elif staged is not None:
                staged.fill(*_clear_padding(target, parts), parts)
            else:
                _copy(*_clear_padding(target, parts), parts)
            bytes_read += sum(part.nbytes for part in parts)
            if check_finite and not _is_finite(target.tensor):
                strange.append(name)
            done(target.tensor.nbytes)
    if staged is not None:
        staged.finish()
    if strange:
        names = ", ".join(strange[:MOST_SHOWN])
        text = f"{folder.path}: {len(strange)} of {len(targets)} tensors hold NaN or infinity"
        warnings.warn(f"{text}: {names}", stacklevel=2)
    return Loaded(len(targets), bytes_read, mapped)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or infinity; it is checked in pieces, since a full mask would take memory."""
    if tensor.dtype not in FLOATS:
        return True
    return all(bool(piece.isfinite().all()) for piece in tensor.reshape(-1).split(PIECE))


def _stays(target: Target, parts: Sequence[Tensor]) -> bool:
    return target.may_map and len(parts) == 1 and can_stay_mapped(parts[0], target.tensor)


def _clear_padding(target: Target, parts: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Set the padding at the end of a target's tensor (e.g. of the vocabulary) to 0; return the view without it, and
    the axis along which `parts`, slices of the unsharded tensor in the file, have to be concatenated to fill this view.
    """
    tensor, axis = target.tensor, target.placement.axis if target.placement else 0
    if not tensor.ndim:
        return tensor.view(1), axis
    filled = sum(part.shape[axis] for part in parts)
    tensor.narrow(axis, filled, tensor.shape[axis] - filled).zero_()
    return tensor.narrow(axis, 0, filled), axis


def _copy(tensor: Tensor, axis: int, parts: Sequence[Tensor]) -> None:
    """Copy `parts`, concatenated along `axis`, into `tensor`, which has their joint shape; the copy casts to its dtype."""
    filled = 0
    for part in parts:
        size = part.shape[axis] if part.ndim else 1
        _copy_words(tensor.narrow(axis, filled, size), part)
        filled += size


def _copy_words(tensor: Tensor, part: Tensor) -> None:
    """Copy `part` into `tensor`, as 8-byte words if strides allow it, which is 10 % faster than 2 bytes at a time."""
    if tensor.dtype == part.dtype:
        with contextlib.suppress(RuntimeError):  # rows or strides are no multiple of 8 bytes
            tensor, part = tensor.view(torch.int64), part.view(torch.int64)
    tensor.copy_(part)


def check_targets(
    targets: Mapping[str, Target], folder: CheckpointFolder, source: Mapping[str, str], mesh: Mesh
) -> None:
    """Raise one WeightsError that lists every target (tensor of this rank) which the checkpoint cannot fill;
    change nothing. `source` maps the targets' names to checkpoint keys.
    """
    problems = []
    for name, target in targets.items():
        if name not in source:
            problems.append(f"{name}: missing, expected shape {list(target.shape)}")
        elif problem := _problem(target, folder, source[name], mesh):
            problems.append(f"{name} (key {source[name]}): {problem}")
    if not problems:
        return
    shown = problems[:MOST_SHOWN]
    if len(problems) > MOST_SHOWN:
        shown.append(f"... and {len(problems) - MOST_SHOWN} more")
    what = f"{len(problems)} of {len(targets)} tensors do not fit the model"
    hint = "pass a checkpoint of this architecture, size and vocabulary, or"
    hint += " ignore_mismatched_sizes=True to initialise tensors of another shape at random"
    raise WeightsError(str(folder.path), what, "\n    ".join(["", *shown]), hint)


def _problem(target: Target, folder: CheckpointFolder, key: str, mesh: Mesh) -> str:
    """Return why the checkpoint tensor `key` cannot fill a target (wrong shape or dtype), or "" if it can."""
    shape, placement = tuple(target.shape), target.placement
    if folder.shape(key) != shape:
        return f"found shape {list(folder.shape(key))}, expected {list(shape)}"
    dtypes = {folder.dtype(key), target.tensor.dtype}
    if len(dtypes) > 1 and not dtypes.issubset(FLOATS):  # 8-bit floats would need scales
        return f"found dtype {folder.dtype(key)}, expected one that fits {target.tensor.dtype}"
    if placement is not None:
        n, r = mesh.size(placement.mesh_dim), mesh.coord(placement.mesh_dim)
        if problem := placement.problem(shape[placement.axis], n):
            return problem
        shape = placement.local_shape(shape, n, r)
    if target.rows is not None:
        shape = (target.rows[1], *shape[1:])
    if tuple(target.tensor.shape) != shape:
        return f"found a local tensor of {list(target.tensor.shape)}, expected {list(shape)}"
    return ""


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
    """Yield (name, this rank's slices of the tensor in the mapped files of `folder`) in `order`, which should sort by
    file offset; the next slices are prefetched. `targets` are the tensors to fill by name, `source` maps names to keys.
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
    """Return the number of bytes that a strided slice spans, from its first element to its last."""
    steps = zip(part.shape, part.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * part.itemsize
