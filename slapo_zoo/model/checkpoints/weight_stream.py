"""Streams of unsharded weights, some tensors at a time, from a sharded model to chosen ranks and back into a model.

rewrite:  shard of each rank [..., size / tp, ...]  <-->  (key in files, unsharded tensor [..., size, ...])
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.checkpoints.current_specs import refresh_specs
from slapo_zoo.model.checkpoints.training_checkpoint import weights_of
from slapo_zoo.parallel import gather as consolidate
from slapo_zoo.parallel.local_tensors import Rows, runs_within
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Run, TensorSpec
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import parse_size, to_dtype

PIECE = 16 << 20  # bytes of one message
Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class _Run:
    """Range of `length` consecutive indices along `axis` of a tensor; the global rank `rank` sends these elements.

    `start` is the first index in the unsharded tensor, `offset` the first index in the rank's shard.
    """

    rank: int
    axis: int
    start: int
    offset: int
    length: int


def stream_weights(model: Any, dtype: Any, bucket: int | str, ranks: Collection[int]) -> Named:
    """Yield (key in files, unsharded tensor) for all tensors of the model; a collective call.

    Args:
        model: a scheduled model.
        dtype: dtype of the yielded floating tensors; None keeps theirs.
        bucket: most bytes held beyond the model at a time, e.g. "512MB"; a larger tensor is sent alone.
        ranks: global ranks that get the tensors; the others yield nothing.
    """
    mesh, most = model.mesh, parse_size(bucket, "bucket") or 0
    wrong = [rank for rank in ranks if not 0 <= rank < mesh.world_size]
    if wrong or not ranks:
        problem = f"found {list(ranks)}, expected one or more ranks of 0..{mesh.world_size - 1}"
        hint = "pass ranks of this mesh, e.g. ranks=(0,)"
        raise SlapoError("stream_weights", "ranks", problem, hint)
    cast = None if dtype is None else to_dtype(dtype, "stream_weights")
    with rank_guard("stream_weights"):
        refresh_specs(model, "stream_weights")
    runtime, local = model._slapo, _Held(model)
    device = next(model.parameters()).device
    for specs in _buckets(runtime.keys.file_specs(runtime.specs), cast, most):
        with rank_guard("stream_weights"), torch.no_grad():
            found = _collect(specs, local, mesh, cast, ranks, device)
        while found:
            yield found.pop(0)


class _Held:
    """Lookup of this rank's tensors of `model` by key in files; under ZeRO `get` is a collective call over dp."""

    def __init__(self, model: Any):
        self.model, runtime = model, model._slapo
        self.held = consolidate.local_tensors(model, runtime.specs, model.mesh, rows=True)
        self.source = {part.name: spec.name for spec in runtime.specs
                       for part in runtime.keys.file_specs([spec])}  # fmt: skip
        self._name, self._files = "", {}

    def get(self, key: str) -> Tensor | None:
        """Return this rank's tp shard of the tensor with this key in files, on its device; None if another stage has it.
        Under ZeRO the dp ranks of the first replica all-gather the shard's rows; other dp ranks return None.
        """
        name, runtime = self.source[key], self.model._slapo
        if name not in self.held or not runtime.data_parallel.sends(self.model.mesh):
            return None
        if name != self._name:
            self._name, self._files = name, {}  # frees the tensor before
            held, shape = self.held[name], runtime.plan.local_shape(name)
            whole = runtime.data_parallel.whole_of(held, held, shape)
            self._files = runtime.keys.to_files({name: whole}, runtime.specs, self.model.mesh)
        return self._files.get(key)


def _buckets(
    specs: Sequence[TensorSpec], cast: torch.dtype | None, most: int
) -> Iterator[list[TensorSpec]]:
    """Yield lists of consecutive `specs` whose tensors take at most `most` bytes together; a larger one is alone.

    `cast` is the dtype in which floating tensors are sent; None: each tensor's dtype. The last tensor of a list counts
    in the next list too, because the caller still holds that tensor.
    """
    run: list[TensorSpec] = []
    size = nbytes = 0
    for spec in specs:
        last, nbytes = nbytes, math.prod(spec.shape) * _sent_as(spec, cast).itemsize
        if run and size + nbytes > most:
            yield run
            run, size = [], last
        run.append(spec)
        size += nbytes
    if run:
        yield run


def _sent_as(spec: TensorSpec, cast: torch.dtype | None) -> torch.dtype:
    own: torch.dtype = getattr(torch, spec.dtype)
    return cast if cast is not None and own.is_floating_point else own


def _collect(
    specs: Sequence[TensorSpec], local: _Held, mesh: Mesh, cast: torch.dtype | None,
    ranks: Collection[int], device: torch.device,
) -> list[tuple[str, Tensor]]:  # fmt: skip
    """Collect unsharded tensors on the global ranks `ranks`; return [(key in files, tensor)] there, [] on other ranks.

    Args:
        specs: key in files, shape and sharding of each tensor.
        local: lookup of this rank's shards by their keys in files.
        mesh: mesh of the model.
        cast: dtype in which floating tensors are sent; None: each tensor's dtype.
        ranks: global ranks that get the tensors.
        device: device of the results.
    """
    found = []
    for spec in specs:
        dtype, full, mine = _sent_as(spec, cast), None, local.get(spec.name)
        if mesh.rank in ranks:
            full = torch.empty(spec.shape, dtype=dtype, device=device)
            found.append((spec.name, full))
        for run in _runs(spec, mesh):
            for to in sorted(ranks):
                if mesh.rank in (run.rank, to):
                    _send(run, mine, full, dtype, mesh.rank, to)
    return found


def _runs(spec: TensorSpec, mesh: Mesh) -> list[_Run]:
    """Return ranges of the sharded axis that cover tensor `spec` once, each with its sender, the first rank with it."""
    owners = [mesh.at(tp=tp, loss=0, pp=spec.stage) for tp in range(mesh.tp)]
    if spec.placement is None or not spec.shape:
        return [_Run(owners[0], 0, 0, 0, spec.shape[0] if spec.shape else 1)]
    axis = spec.placement.axis
    return [
        _Run(rank, axis, run.start, offset, run.stop - run.start)
        for r, rank in enumerate(owners)
        for run, offset in spec.placement.owned(spec.shape[axis], mesh.tp, r)
    ]


def _send(
    run: _Run, mine: Tensor | None, full: Tensor | None, dtype: torch.dtype, rank: int, to: int
) -> None:
    """Send the range `run` of a tensor from `run.rank` to rank `to`, in messages of about 16 MiB; both ranks call this.

    Args:
        run: range of indices, and the rank that holds the elements.
        mine: this rank's shard of the tensor; None if this rank holds none.
        full: the unsharded tensor to fill, on rank `to`; None elsewhere.
        dtype: dtype of the messages.
        rank: this rank.
        to: receiving rank.
    """
    source = None if mine is None or rank != run.rank else _cut(mine, run.axis, run.offset, run.length)  # fmt: skip
    target = None if full is None or rank != to else _cut(full, run.axis, run.start, run.length)
    shaped = source if target is None else target
    assert shaped is not None  # noqa: S101 - this rank sends or receives
    for start, stop in _row_ranges(shaped, dtype):
        part = None if source is None else source[start:stop].to(dtype)
        if target is not None and part is not None:
            target[start:stop].copy_(part)
        elif part is not None:
            dist.send(part.contiguous(), to)
        elif target is not None:
            piece = target[start:stop]
            received = piece if piece.is_contiguous() else torch.empty_like(piece).contiguous()
            dist.recv(received, run.rank)
            if received is not piece:
                piece.copy_(received)


def _cut(tensor: Tensor, axis: int, start: int, length: int) -> Tensor:
    return (tensor if tensor.ndim else tensor.view(1)).narrow(axis, start, length)


def _row_ranges(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yield consecutive (start, stop) ranges along axis 0 of `tensor`, whose rows take about 16 MiB each in `dtype`."""
    row = max(math.prod(tensor.shape[1:]) * dtype.itemsize, 1)
    step = max(PIECE // row, 1)
    for start in range(0, tensor.shape[0], step):
        yield start, min(start + step, tensor.shape[0])


def load_stream(
    model: Any, stream: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | None, rank: int
) -> None:
    """Fill a model with the (key in files, unsharded tensor) pairs that one rank reads; SlapoError if one is missing.

    Args:
        model: a scheduled model.
        stream: the pairs, in any order, or a dict of them, also a plain model's state dict; needed on `rank` alone.
        rank: global rank that reads the pairs and broadcasts them.
    """
    with rank_guard("load_stream"), torch.no_grad():
        refresh_specs(model, "load_stream")
        whole = model._slapo.data_parallel.whole(model)
        targets, keys = weights_of(model, whole)
        by_key = {keys[name]: target for name, target in targets.items()}
        plan, keys_of = model._slapo.plan, model._slapo.keys.to_file
        known = {key: keys_of(plan.saved_as(n)) for n in plan.tensors for key in (n, keys_of(n))}
        shapes = {s.name: s.shape for s in model._slapo.keys.file_specs(model._slapo.specs)}
        left = dict.fromkeys(shapes)
        given = stream.items() if isinstance(stream, Mapping) else stream or ()
        pairs = iter(given) if model.mesh.rank == rank else None
        while (header := _next_pair(pairs, model, rank)) is not None:
            key, tensor, shape, dtype = header
            key = key if key in shapes else known.get(key, key)
            if shapes.get(key) != shape:
                expected = list(shapes[key]) if key in shapes else "no tensor of this name"
                problem = f"the stream has shape {list(shape)}, the model has {expected}"
                hint = "pass the pairs of stream_weights of a model with the same class and sizes"
                raise SlapoError("load_stream", key, problem, hint)
            left.pop(key, None)
            _broadcast(by_key.get(key), tensor, shape, dtype, model, rank)
        whole.put_back()
        if left:
            problem = f"{len(left)} tensors are missing from the stream, this one first; the others were loaded"
            hint = "pass a (name, tensor) pair for every tensor of the model"
            raise SlapoError("load_stream", next(iter(left)), problem, hint)


def _next_pair(pairs: Any, model: Any, rank: int) -> Any:
    """Read the next (key, tensor) of `pairs` on `rank`, and broadcast key, shape and dtype to all ranks.

    Return (key, tensor, shape, dtype), or None at the end of `pairs`. On other ranks `pairs` and `tensor` are None.
    """
    key, tensor = next(pairs, (None, None)) if pairs is not None else (None, None)
    header = [None if tensor is None else (key, tuple(tensor.shape), tensor.dtype)]
    if model.mesh.world_size > 1:
        dist.broadcast_object_list(header, rank, device=next(model.parameters()).device)
    if header[0] is None:
        return None
    key, shape, dtype = header[0]
    return key, tensor, shape, dtype


def _broadcast(
    target: Target | None, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype,
    model: Any, rank: int,
) -> None:  # fmt: skip
    """Broadcast an unsharded tensor from `rank`, some rows at a time; copy this rank's shard into `target`.

    Args:
        target: this rank's tensor to fill, with its sharding; None if this rank holds no part of the tensor.
        tensor: the tensor on `rank`, None elsewhere.
        shape: unsharded shape.
        dtype: dtype of the tensor.
        model: the scheduled model.
        rank: global rank that has the tensor.
    """
    device = next(model.parameters()).device
    rows = torch.empty(shape or (1,), dtype=dtype, device="meta")
    source = None if tensor is None else tensor.detach().reshape(rows.shape)
    for start, stop in _row_ranges(rows, dtype):
        if source is not None:
            piece = source[start:stop].to(device).contiguous()
        else:
            piece = torch.empty((stop - start, *rows.shape[1:]), dtype=dtype, device=device)
        if model.mesh.world_size > 1:
            dist.broadcast(piece, rank)
        if target is not None:
            _copy_shard(target, piece, start, model.mesh)


def _copy_shard(target: Target, piece: Tensor, first: int, mesh: Mesh) -> None:
    """Copy this rank's elements of `piece` into `target`; `piece` has rows of an unsharded tensor from row `first` on."""
    own = target.tensor if target.tensor.ndim else target.tensor.view(1)
    axis, kept, runs = 0, target.rows or Rows(0, len(own)), [Run(0, piece.shape[0] + first)]
    if target.placement is not None:
        axis, dim = target.placement.axis, target.placement.mesh_dim
        runs = target.placement.runs(target.shape[axis], mesh.size(dim), mesh.coord(dim))
    if axis:  # this rank's rows of the piece; below, their columns that this rank holds
        low, high = max(first, kept.first), min(first + len(piece), kept.first + kept.count)
        if low >= high:
            return
        own, piece = own[low - kept.first : high - kept.first], piece[low - first : high - first]
        first = 0
    offset = 0
    for start, stop in runs if axis else runs_within(runs, kept.first, kept.count):
        low, high = max(start, first), min(stop, first + piece.shape[axis])
        if low < high and piece.numel():
            cut = piece.narrow(axis, low - first, high - low)
            own.narrow(axis, offset + low - start, high - low).copy_(cut)
        offset += stop - start
