"""Copy every rank's slices out of the mapped files, straight into its parameters."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.mesh import Mesh
from slapo_zoo.placement import Placement
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.progress import byte_progress

MOST_SHOWN = 20
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PIECE = 1 << 22  # elements


@dataclass(frozen=True)
class Target:
    """A local tensor to be filled.

    Args:
        tensor: allocated, of any dtype and device; the copy casts.
        shape: the shape that the checkpoint's tensor must have.
        placement: how the mesh divides it, or None when the rank holds all of it.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    placement: Placement | None = None


@dataclass(frozen=True)
class LoadOptions:
    """What a person may ask of a load.

    Args:
        max_memory: most bytes that this rank's tensors may take; None sets no limit.
        check_finite: warn about tensors that hold NaN or infinity.
    """

    max_memory: int | None = None
    check_finite: bool = False


def parse_size(size: int | str | None, what: str) -> int | None:
    """Bytes of "8GB" or of a number; None stays.

    >>> parse_size("1.5GB", "max_load_memory"), parse_size(7, "max_load_memory")
    (1500000000, 7)
    """
    if not isinstance(size, str):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
    if match is None:
        problem = f"found {size!r}, expected bytes"
        raise WeightsError("from_pretrained", what, problem, 'pass e.g. "8GB"')
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


class Loaded(NamedTuple):
    """How much was read: tensors, and bytes in the dtype of the files."""

    tensors: int
    bytes_read: int


def load_tensors(
    targets: Mapping[str, Target],
    folder: CheckpointFolder,
    source: Mapping[str, str],
    mesh: Mesh,
    check_finite: bool = False,
) -> Loaded:
    """Fill every target from its checkpoint key; padding becomes zeros.

    rewrite:  w [..., size, ...] in the file  -->  tensor [..., local_size(size, n, r), ...]

    All targets are checked first: if any is missing from `source`, misshaped, or of another kind
    of dtype, one WeightsError lists them all and no tensor is touched. On the CPU no copy is made
    on the way; only the bytes of the slices are read, rounded to pages.

    Args:
        targets: model name --> where its values go.
        folder: the checkpoint.
        source: model name --> checkpoint key, of `match_names`.
        mesh: sizes of the mesh, and our coordinates.
        check_finite: warn about tensors that hold NaN or infinity.
    """
    _check(targets, folder, source, mesh)
    bytes_read, strange = 0, []
    total = sum(target.tensor.nbytes for target in targets.values())
    with torch.no_grad(), byte_progress("loading", total, visible=mesh.rank == 0) as done:
        for name in sorted(targets, key=lambda name: folder.position(source[name])):
            tensor = targets[name].tensor
            bytes_read += _fill(targets[name], folder.view(source[name]), mesh)
            if check_finite and not _is_finite(tensor):
                strange.append(name)
            done(tensor.nbytes)
    if strange:
        names = ", ".join(strange[:MOST_SHOWN])
        text = f"{folder.path}: {len(strange)} of {len(targets)} tensors hold NaN or infinity"
        warnings.warn(f"{text}: {names}", stacklevel=2)
    return Loaded(len(targets), bytes_read)


def _is_finite(tensor: Tensor) -> bool:
    """In pieces: the answer for a whole tensor would take a byte per element."""
    if tensor.dtype not in FLOATS:
        return True
    return all(bool(piece.isfinite().all()) for piece in tensor.reshape(-1).split(PIECE))


def _fill(target: Target, view: Tensor, mesh: Mesh) -> int:
    """Copy the runs of one tensor; return the bytes read."""
    placement, tensor = target.placement, target.tensor
    if placement is None:
        tensor.copy_(view)
        return view.nbytes
    axis, filled = placement.axis, 0
    n, r = mesh.size(placement.mesh_dim), mesh.coord(placement.mesh_dim)
    for start, stop in placement.runs(view.shape[axis], n, r):
        run = view.narrow(axis, start, stop - start)
        tensor.narrow(axis, filled, stop - start).copy_(run)
        filled += stop - start
    tensor.narrow(axis, filled, tensor.shape[axis] - filled).zero_()
    return view.nbytes * filled // max(view.shape[axis], 1)


def _check(
    targets: Mapping[str, Target], folder: CheckpointFolder, source: Mapping[str, str], mesh: Mesh
) -> None:
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
    hint = "is it a checkpoint of another architecture, size or vocabulary?"
    raise WeightsError(str(folder.path), what, "\n    ".join(["", *shown]), hint)


def _problem(target: Target, folder: CheckpointFolder, key: str, mesh: Mesh) -> str:
    """Why a key cannot fill a target, or the empty string."""
    shape, placement = tuple(target.shape), target.placement
    if folder.shape(key) != shape:
        return f"found shape {list(folder.shape(key))}, expected {list(shape)}"
    if not _can_cast(folder.dtype(key), target.tensor.dtype):
        return f"found dtype {folder.dtype(key)}, expected one that fits {target.tensor.dtype}"
    if placement is not None:
        n, r = mesh.size(placement.mesh_dim), mesh.coord(placement.mesh_dim)
        if problem := placement.problem(shape[placement.axis], n):
            return problem
        shape = placement.local_shape(shape, n, r)
    if tuple(target.tensor.shape) != shape:
        return f"found a local tensor of {list(target.tensor.shape)}, expected {list(shape)}"
    return ""


def _can_cast(found: torch.dtype, expected: torch.dtype) -> bool:
    """Only between real floating dtypes: an 8-bit or integer weight means nothing without scales."""
    return found == expected or (found in FLOATS and expected in FLOATS)
