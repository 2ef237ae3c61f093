"""Write one rank's slices of the tensors at their offsets in the files.

`pwrite` is used and no mapping: on a full disk it raises, where a store to a mapped page kills the process.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from slapo_zoo.parallel.local_tensors import Rows
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights import crc
from slapo_zoo.weights.file_layout import Slot

LEAST_FLUSHED = 2**20  # bytes


class Share(NamedTuple):
    """Range of indices along the sharded axis that this rank writes to a file.

    The indices start..stop-1 count in the unsharded tensor; `offset` is the index of `start` in the local tensor.
    """

    start: int
    stop: int
    offset: int


class Written(NamedTuple):
    """Result of one rank's writes: number of bytes, and {tensor: what they add, by XOR, to the tensor's CRC-32}."""

    bytes: int
    sums: dict[str, int]


def write_tensors(
    path: Path, slots: Mapping[str, Slot], specs: Sequence[TensorSpec], local: Mapping[str, Tensor],
    mesh: Mesh, rows: Mapping[str, Rows | None] | None = None,
) -> Written:  # fmt: skip
    """Write this rank's slices into the files below `path` and flush them to disk; return their bytes, and for each
    tensor what they add, by XOR, to its CRC-32. Only one tensor at a time is copied (to the CPU, or to be contiguous).

    Args:
        path: folder in which the files exist in full size.
        slots: tensor name --> file and offset.
        specs: all tensors of the model.
        local: name --> tensor of this rank, at least for the tensors that it writes.
        mesh: mesh with the coordinates of this rank.
        rows: tensor name --> which rows of its tp shard this rank has under ZeRO, None: all; None without ZeRO.
    """
    rows = rows or {}
    held = {spec.name: shares(spec, mesh, rows.get(spec.name)) for spec in specs}
    mine = [spec for spec in specs if held[spec.name]]
    written, sums = 0, {}
    by_place = sorted(mine, key=lambda spec: slots[spec.name])
    for name, group in groupby(by_place, key=lambda spec: slots[spec.name].file):
        with (path / name).open("r+b", buffering=0) as file:
            for spec in group:
                tensor = local[spec.name].detach().to("cpu")
                count, sums[spec.name] = _write(
                    file, slots[spec.name].start, tensor, spec, held[spec.name], rows.get(spec.name)
                )
                written += count
                del tensor  # before the next one is copied
    for name in sorted({slots[spec.name].file for spec in mine}):  # after all writes
        with (path / name).open("r+b", buffering=0) as file:
            os.fsync(file.fileno())
    return Written(written, sums)


def shares(spec: TensorSpec, mesh: Mesh, rows: Rows | None = None) -> list[Share]:
    """Return the slices of a tensor that this rank writes, as ranges of indices on the axis that a mesh dim shards; []
    if none. A tensor that no mesh dim shards has one range: its ZeRO `rows` on axis 0, or without ZeRO 0 to 1, for the
    whole tensor. If a mesh dim shards axis 0, `rows` (of this rank's shard) narrow the ranges.

    Of ranks with the same elements only the first writes: the one with coordinate 0 of the mesh dims that do not shard
    the tensor, and of tp ranks that share indices (KV heads) the first.
    """
    placement = spec.placement
    divided = placement.mesh_dim if placement else ""
    others = [mesh.coord("tp")] * (divided != "tp") + [mesh.coord("loss")] * (rows is None)
    if spec.stage != mesh.coord("pp") or any(others) or (rows and not (rows.writes and rows.count)):
        return []
    if placement is None:
        return [Share(0, 1, 0) if rows is None else Share(rows.first, rows.first + rows.count, 0)]
    size, n, r = spec.shape[placement.axis], mesh.size(divided), mesh.coord(divided)
    found: list[Share] = []
    for run, offset in placement.owned(size, n, r):
        if found and found[-1].stop == run.start:
            found[-1] = found[-1]._replace(stop=run.stop)  # adjacent groups: one write
        else:
            found.append(Share(run.start, run.stop, offset))
    return found if rows is None or placement.axis else list(_within(found, rows))


def _within(shares: Sequence[Share], rows: Rows) -> Iterator[Share]:
    """Yield the parts of `shares` (ranges of axis 0) that lie in this rank's `rows`; their offsets count from rows.first."""
    for share in shares:
        low = max(share.offset, rows.first)
        high = min(share.offset + share.stop - share.start, rows.first + rows.count)
        if low < high:
            begin = share.start + low - share.offset
            yield Share(begin, begin + high - low, low - rows.first)


def _write(
    file: BinaryIO, start: int, tensor: Tensor, spec: TensorSpec, held: Sequence[Share],
    own: Rows | None,
) -> tuple[int, int]:  # fmt: skip
    """Write the index ranges `held` (on the sharded axis, from `shares`) of this rank's CPU `tensor`, in its dtype;
    return (number of bytes, what they add, by XOR, to the CRC-32 of the unsharded tensor). The unsharded tensor begins
    at byte `start` of the file. `own` are the rows of axis 0 that `tensor` has under ZeRO, else None.
    """
    axis = spec.placement.axis if spec.placement else 0
    is_piece = spec.placement is None and own is None
    shape = (1, *spec.shape) if is_piece else spec.shape
    tensor = tensor.unsqueeze(0) if is_piece else tensor
    inner = math.prod(shape[axis + 1 :]) * tensor.itemsize
    above = math.prod(shape[1:axis]) if axis else 1  # file rows per index of axis 0
    first, count = (own.first, own.count) if own and axis else (0, shape[0] if axis else 1)
    whole = math.prod(shape) * tensor.itemsize
    start += (skipped := first * above * shape[axis] * inner)
    written = total = 0
    for share in held:
        width = share.stop - share.start
        piece = _bytes(tensor.narrow(axis, share.offset, width))
        rows, chunk = count * above, width * inner
        if width == shape[axis]:
            rows, chunk = 1, rows * chunk  # rows are contiguous in the file: one write
        for row in range(rows if chunk else 0):
            place = start + row * shape[axis] * inner + share.start * inner
            _pwrite(file, piece[row * chunk : (row + 1) * chunk], place)
        if rows == 1 and chunk >= LEAST_FLUSHED:
            _start_flush(file, start + share.start * inner, chunk)
        if chunk and rows:
            stride = shape[axis] * inner
            behind = whole - skipped - (rows - 1) * stride - share.start * inner - chunk
            total ^= crc.times(crc.of_rows(piece, rows, chunk, stride), crc.shift(behind))
        written += rows * chunk
    return written, total


def _start_flush(file: BinaryIO, begin: int, count: int) -> None:
    """Start to write a range of the file to disk, without waiting.

    If only fsync wrote, the disk would be idle until the last byte is in memory. The caller passes only ranges
    that share no page with another rank's slices: a page already on disk may have to be read again to change it.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, count, os.POSIX_FADV_DONTNEED)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a CPU tensor as bytes, in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _pwrite(file: BinaryIO, piece: memoryview, place: int) -> None:
    """Write all of `piece` to `file` at byte offset `place`; the kernel takes at most 2 GiB per call."""
    while piece:
        done = os.pwrite(file.fileno(), piece, place)
        piece, place = piece[done:], place + done
