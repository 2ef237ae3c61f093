"""Save a model from all ranks at once: each rank writes its slices into files of full size.

No rank holds more of the model than it trains, and a crash at any moment leaves the old folder unchanged.
"""

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.digests import digest, unlike
from slapo_zoo.parallel.local_tensors import Rows
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.weights import checksums, crc
from slapo_zoo.weights.carry import WEIGHT_FILE
from slapo_zoo.weights.checksums import BLANK, Checksums, read_checksums
from slapo_zoo.weights.file_layout import Layout, Slot, plan_layout, tensor_bytes, torch_dtype
from slapo_zoo.weights.index import index_name
from slapo_zoo.weights.safetensors_file import SAVE_ID, SafetensorsFile
from slapo_zoo.weights.staging import Staging, resolved
from slapo_zoo.weights.write import Written, write_tensors

STEP = "save_folder"
PYTORCH = {"format": "pt"}
WriteExtras = Callable[[Path, str], None] | None  # (folder, id of the save)


def save_folder(
    folder: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    local: Mapping[str, Tensor],
    mesh: Mesh,
    write_extras: WriteExtras = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    beside: Mapping[str, Sequence[TensorSpec]] | None = None,
    stem: str = "model",
    stamp: str = "",
    rows: Mapping[str, Rows | None] | None = None,
    check_finite: bool = True,
) -> None:
    """Write a checkpoint that plain `transformers` loads; a collective call of all ranks.

    rewrite:  w_r [..., local_size(size, n, r), ...] on rank r of n  -->  w [..., size, ...] in the file

    A failure on one rank raises on all ranks and leaves the old folder unchanged. Files of the old folder that are not
    weights, or weights under another `stem`, are kept, unless `write_extras` wrote new ones.

    Args:
        folder: target folder, on a file system that all ranks share; rank 0 decides where it is.
        specs: name, unsharded shape, dtype, placement and pipeline stage of each tensor of the whole model, in
            state-dict order; the same on every rank.
        local: this rank's tensors by name, also for `beside`; at least those of its stage, in the dtype of their specs.
        mesh: mesh with the coordinates of this rank.
        write_extras: called on rank 0 with the temporary folder and the save's id; writes config and tokenizer.
        max_shard_size: largest file, "5GB" or bytes.
        metadata: `__metadata__` of the files; {"format": "pt"} by default.
        beside: beginning of further files' names --> specs of the tensors in those files: {"optimizer": specs}.
        stem: beginning of the file names for `specs`.
        stamp: text that, with the checksums of all tensors, determines the id of the save: training state as JSON.
        rows: name --> which rows of this rank's tp shard its local tensor has under ZeRO, None: all; None without ZeRO.
        check_finite: raise when NaN or infinite weights would replace an older checkpoint.
    """
    save = _Save(folder, {stem: specs, **(beside or {})}, local, mesh, rows or {})
    kept = {**(metadata or PYTORCH), SAVE_ID: BLANK}
    save.finite = [spec.name for spec in specs] if check_finite else []
    if differs := unlike(together(mesh, STEP, lambda: save.prepare(max_shard_size, kept))):
        problem = f"ranks {differs} differ from rank 0 in names or unsharded shapes of tensors, or in max_shard_size"
        hint = "save the same model on all ranks, with the same max_shard_size"
        raise WeightsError(STEP, "specs", problem, hint)
    try:
        path = Path(together(mesh, STEP, save.create)[0])
        written = together(mesh, STEP, lambda: save.write(path))
        together(mesh, STEP, lambda: save.finish(written, stamp, write_extras))
    finally:
        save.staging.discard()


def _replaced_by(stem: str) -> re.Pattern[str]:
    """Return a pattern that matches the names of the files that a save with this stem of file names replaces: with the
    stem "model" all weights, optimizer, training state and checksums; with another only its own weights and checksums.
    """
    index = re.escape(index_name(stem))
    own = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors|{index}|checksums\.json")
    return WEIGHT_FILE if stem == "model" else own


class _Save:
    """One save on one rank: all ranks call prepare, create, write and finish; only rank 0 makes folders and files."""

    def __init__(
        self, given: str | os.PathLike[str], sets: Mapping[str, Sequence[TensorSpec]], local: Mapping[str, Tensor],
        mesh: Mesh, rows: Mapping[str, Rows | None],
    ):  # fmt: skip
        self.given, self.sets, self.local, self.mesh, self.rows = given, sets, local, mesh, rows
        self.specs = [spec for specs in sets.values() for spec in specs]
        self.replaced, self.layout = _replaced_by(next(iter(sets))), Layout()
        self.finite: list[str] = []  # tensors that may not be NaN in place of an older checkpoint

    def prepare(self, max_shard_size: int | str, metadata: Mapping[str, str]) -> str:
        """Plan files and check local tensors (WeightsError: shape, dtype, NaN); return a digest, to compare ranks."""
        self.target = resolved(self.given)
        self.staging = Staging(self.target, replaced=self.replaced)
        for stem, specs in self.sets.items():
            self.layout |= plan_layout(specs, max_shard_size, metadata, stem)
        for spec in self.specs:
            _check_spec(spec, self.local, self.mesh, self.rows.get(spec.name))
        with self._io_errors():
            old = list(self.target.iterdir()) if self.target.is_dir() else ()
        if any(self.replaced.fullmatch(file.name) for file in old):
            held = {n: self.local[n] for n in self.finite if n in self.local}
            require_finite(self.target, held)
        strange = self.local.keys() - self.layout.slots.keys()
        if strange:
            problem = f"found {len(strange)} tensors without a spec (TensorSpec), expected none"
            hint = "add no parameters after the load, or pass their TensorSpecs in `specs`"
            raise WeightsError(STEP, min(strange), problem, hint)
        return digest(self.layout, self.specs)

    def create(self) -> str:
        """Create the temporary folder and its files in full size on rank 0 (a full disk fails now); return its path."""
        if self.mesh.rank == 0:
            with self._io_errors():
                self.staging.create()
                for name, header in self.layout.headers.items():
                    _reserve(self.staging.path / name, header, self.layout.sizes[name])
        return str(self.staging.path)

    def write(self, path: Path) -> Written:
        """Write this rank's slices of all tensors; return number of bytes and contribution to each tensor's CRC-32."""
        with self._io_errors():
            return write_tensors(
                path, self.layout.slots, self.specs, self.local, self.mesh, self.rows
            )

    def finish(self, written: Sequence[Written], stamp: str, write_extras: WriteExtras) -> None:
        """Complete the save on rank 0: put its id (a digest of `stamp` and of the checksums in `written`, one per rank)
        into the files, write index and checksums, call `write_extras`, rename the folder to its target.
        """
        if self.mesh.rank != 0:
            return
        found, expected = sum(one.bytes for one in written), sum(map(tensor_bytes, self.specs))
        if found != expected:
            problem = f"found {found} bytes written by all ranks, expected {expected}"
            hint = "check that the placements in `specs` cover every element of each tensor"
            raise WeightsError(STEP, self.target, problem, hint)
        path = self.staging.path
        with self._io_errors():
            kept = self._stamp(written, stamp)
            for name, text in self.layout.indexes.items():
                (path / name).write_text(text, encoding="utf-8")
            if write_extras is not None:
                write_extras(path, kept.save)
            _check_files(path, self.layout)
            kept.files.update(_small_files(path, self.layout))
            self._beside_others(kept).write(path)
            self.staging.publish()

    def _beside_others(self, kept: Checksums) -> Checksums:
        """Return `kept`, the checksums of this save. For a variant (`model.fp16`) in a folder with other weights,
        return the folder's old checksums instead, updated by `kept` for files without weights (config.json).
        """
        old = None if self.replaced is WEIGHT_FILE else read_checksums(self.target)
        if old is None or all(self.replaced.fullmatch(name) for name in old.tensors):
            return kept
        changed = {name: crc for name, crc in kept.files.items() if "#" not in name}
        return replace(old, files=old.files | changed)

    def _stamp(self, written: Sequence[Written], stamp: str) -> Checksums:
        """Write the id of the save, a digest of all checksums and of the text `stamp`, into all
        headers; return the checksums of headers and tensors. `written` holds each rank's result.
        """
        sums = {
            spec.name: crc.combined(
                [one.sums.get(spec.name, 0) for one in written], tensor_bytes(spec)
            )
            for spec in self.specs
        }
        kept = Checksums(checksums.save_id(sums, stamp))
        for name, blank in self.layout.headers.items():
            header = checksums.with_save_id(blank, kept.save)
            with (self.staging.path / name).open("r+b", buffering=0) as file:
                file.write(header)
            kept.files[f"{name}#header"] = zlib.crc32(header)
        for name, slot in self.layout.slots.items():
            kept.tensors.setdefault(slot.file, {})[name] = sums[name]
        return kept

    @contextmanager
    def _io_errors(self) -> Iterator[None]:
        """Context that turns an OSError into a WeightsError, which names the folder and says that nothing is lost."""
        try:
            yield
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            hint = "the folder is unchanged: remove this cause, or save to another folder"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                problem += f"; expected {sum(self.layout.sizes.values())} bytes of free space"
                hint += " on another disk"
            elif isinstance(error, FileNotFoundError) and self.mesh.world_size > 1:
                hint += "; do all ranks see it under this path? save to a file system they share"
            raise WeightsError(str(self.target), error.filename or "", problem, hint) from error


def require_finite(target: Path, local: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if one of the tensors `local`, which shall replace the older checkpoint in the folder `target`,
    has NaN or infinity. The host waits for the device once for all tensors.
    """
    held = {n: x.detach() for n, x in local.items()}
    held = {n: x.float() if x.itemsize == 1 else x for n, x in held.items()  # 8-bit floats have no order
            if x.is_floating_point() and x.numel()}  # fmt: skip
    if not held:
        return
    ends = torch.stack([torch.stack(x.aminmax()).double() for x in held.values()])
    good = torch.isfinite(ends).all(-1).tolist()
    if bad := [name for name, is_good in zip(held, good, strict=True) if not is_good]:
        problem = f"found NaN or infinity in {len(bad)} tensors, and an older checkpoint is there"
        hint = "resume from it, it is unchanged; check_finite=False or another folder saves these weights"
        raise WeightsError(str(target), bad[0], problem, hint)


def _check_spec(
    spec: TensorSpec, local: Mapping[str, Tensor], mesh: Mesh, rows: Rows | None
) -> None:
    """Raise WeightsError if this rank has to write a tensor but lacks it, or has it in another shape or dtype. `rows`
    are the rows of the tensor that this rank holds under ZeRO, else None.
    """
    if not 0 <= spec.stage < mesh.pp:
        problem = f"its pipeline stage is {spec.stage}, expected 0..{mesh.pp - 1}"
        raise WeightsError(STEP, spec.name, problem, "correct `stage` of its TensorSpec in `specs`")
    if spec.stage != mesh.coord("pp"):
        return
    if spec.name not in local:
        problem = f"missing on rank {mesh.rank}, whose stage {spec.stage} has to save it"
        raise WeightsError(STEP, spec.name, problem, "pass all tensors of the stage in `local`")
    shape, placement = spec.shape, spec.placement
    if placement is not None:
        n, r = mesh.size(placement.mesh_dim), mesh.coord(placement.mesh_dim)
        if problem := placement.problem(shape[placement.axis], n):
            raise WeightsError(STEP, spec.name, problem, "correct its TensorSpec in `specs`")
        shape = spec.local_shape(n, r)
    shape = shape if rows is None else (rows.count, *shape[1:])
    tensor = local[spec.name]
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch_dtype(spec):
        found = f"{tensor.dtype} of shape {list(tensor.shape)}"
        problem = f"found {found}, expected {torch_dtype(spec)} of shape {list(shape)}"
        hint = "restore the dtype and shape that the parameter was loaded with"
        raise WeightsError(STEP, spec.name, problem, hint)


def _reserve(path: Path, header: bytes, size: int) -> None:
    """Create a file with its header and allocate its full size on disk."""
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # AttributeError: macOS has none
            cannot = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
            if isinstance(error, OSError) and error.errno not in cannot:
                raise
            file.truncate(size)


def _small_files(path: Path, layout: Layout) -> dict[str, int]:
    """Return {file name: CRC-32} of config, index and state files in `path`, not of a tokenizer, which may change."""
    found = sorted(item.name for item in path.iterdir() if item.name not in layout.headers)
    ours = [name for name in found if WEIGHT_FILE.fullmatch(name) or name == "config.json"]
    return {name: checksums.crc_of_file(path / name) for name in ours}


def _check_files(path: Path, layout: Layout) -> None:
    """Raise WeightsError if `write_extras` has changed the weight files: headers in `path` are not as in `layout`."""
    found = {}
    for name in layout.headers:
        with SafetensorsFile(path / name) as file:
            found.update({key: Slot(name, entry.start) for key, entry in file.entries.items()})
    if found != layout.slots:
        wrong = sorted({key for key, _ in found.items() ^ layout.slots.items()})[:5]
        problem = f"the argument write_extras changed the weight files: tensors {wrong} are missing, new or moved"
        raise WeightsError(STEP, str(path), problem, "let write_extras write no weight files")
