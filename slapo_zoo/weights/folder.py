"""An opened checkpoint folder: which file holds which key; each file is opened when first needed.

A `pytorch_model.bin` is read only if the user allows it; its reader has the interface of SafetensorsFile.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.digests import digest
from slapo_zoo.weights.index import check_inside, index_name, read_index
from slapo_zoo.weights.safetensors_file import SAVE_ID, Entry, SafetensorsFile


class PickleFile:
    """Tensors of a `torch.save`d state dict, read with `weights_only=True`.

    Files of torch >= 1.6 are mapped; older ones are read into memory.

    Args:
        path: the file; anything but a plain state dict of tensors raises WeightsError.

    Attributes:
        entries: tensor name --> Entry with its dtype and shape; `start` and `stop` are no file offsets.
        metadata: always empty.
    """

    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, path: Path):
        self._tensors = _load(path)
        self.entries = {n: Entry(t.dtype, tuple(t.shape), 0, t.nbytes) for n, t in self._tensors.items()}  # fmt: skip

    def view(self, name: str) -> Tensor:
        """Return the tensor called `name`, in the shape and dtype that the file has."""
        return self._tensors[name]

    def read_ahead(self, name: str, first: int, count: int) -> None:
        """Do nothing: a pickle does not tell the offsets of tensors, so nothing can be prefetched."""

    def close(self) -> None:
        """Drop the tensors; views made before stay valid."""
        self._tensors = {}


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch raises many types on damaged bytes
        problem = f"found no plain state dict: {str(error).partition(chr(10))[0]:.200}"
        hint = "fetch the file again, or save model.state_dict() alone: no pickle of more than tensors is loaded"
        raise WeightsError(str(path), "", problem, hint) from error
    if not isinstance(found, dict):
        problem = f"found a {type(found).__name__}, expected tensors by name"
        raise WeightsError(str(path), "", problem, "save model.state_dict() alone")
    strange = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if strange:
        problem = f"found a {type(found[strange[0]]).__name__}, expected a tensor"
        raise WeightsError(str(path), f"key {strange[0]!r}", problem, "save the state dict alone")
    return {name: value.detach() for name, value in found.items()}


class CheckpointFolder(AbstractContextManager["CheckpointFolder"]):
    """Opened checkpoint folder, which gives access to tensors by key; `open_checkpoint` makes it.

    Attributes:
        path: the folder.
        key_to_file: key --> name of the file that holds it.
    """

    def __init__(self, path: Path, main: str, allow_pickle: bool = False):
        self.path = path
        self._allow_pickle = allow_pickle
        self._files: dict[str, SafetensorsFile | PickleFile] = {}
        self._indexed: dict[str, set[str]] = {}
        if ".index." in main:
            self.key_to_file = read_index(path / main)
            for key, name in self.key_to_file.items():
                self._indexed.setdefault(name, set()).add(key)
        else:
            self.key_to_file = {}
            self.key_to_file = dict.fromkeys(self._file(main).entries, main)

    def view(self, key: str) -> Tensor:
        """Return a tensor over the mapped file, in the file's shape and dtype; bytes are read on first use."""
        return self._file(self._name(key)).view(key)

    def piece(self, key: str, part: Tensor) -> Tensor | None:
        """Return a tensor with a storage of its own over the mapped bytes of `part`; None for a pickle file.

        Writing to it leaves the file unchanged (copy-on-write).

        Args:
            key: key of the tensor.
            part: contiguous slice of `view(key)`.
        """
        file = self._file(self._name(key))
        if not isinstance(file, SafetensorsFile):
            return None
        return file.piece(key, int(part.storage_offset()), part.shape)

    def read_ahead(self, key: str, first: int, count: int) -> None:
        """Ask the operating system to prefetch `count` bytes of a tensor, from byte `first` of its data."""
        self._file(self._name(key)).read_ahead(key, first, count)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape that a tensor has in the file."""
        return self._file(self._name(key)).entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype that a tensor has in the file."""
        return self._file(self._name(key)).entries[key].dtype

    def nbytes(self, key: str) -> int:
        """Return the bytes that a tensor takes in the file."""
        entry = self._file(self._name(key)).entries[key]
        return entry.stop - entry.start

    def open_all(self) -> "CheckpointFolder":
        """Open every file now, so that later reads see one state even if the folder is replaced; return self."""
        try:
            for name in sorted(set(self.key_to_file.values())):
                self._file(name)
            self._require_one_save()
        except BaseException:
            self.close()
            raise
        return self

    def _require_one_save(self) -> None:
        """Raise WeightsError if two files carry ids of different saves, e.g. after one file was copied alone."""
        known = {name: save for name, save in self.saves().items() if save is not None}
        first = next(iter(known.values()), None)
        for name, save in known.items():
            if save != first:
                problem = f"this file has the save id {save}, {next(iter(known))} has {first}"
                hint = "the folder mixes files of two saves: copy all files of one save"
                raise WeightsError(str(self.path / name), "", problem, hint)

    def saves(self) -> dict[str, str | None]:
        """Return {name of each opened file: id of the save that wrote it}; None stands for a file without id."""
        return {n: file.metadata.get(SAVE_ID) for n, file in self._files.items()}

    def digest(self) -> str:
        """Return a digest of the opened files: names, dtypes, shapes and offsets of their tensors, and the save id; no values."""
        known = {name: (file.metadata, file.entries) for name, file in sorted(self._files.items())}
        return digest(known)

    def position(self, key: str) -> tuple[str, int]:
        """Return (file, offset) of a tensor: a sort key, since tensors are read fastest in this order."""
        name = self._name(key)
        return name, self._file(name).entries[key].start

    def close(self) -> None:
        """Close the files; views made before stay valid."""
        for file in self._files.values():
            file.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _name(self, key: str) -> str:
        if key not in self.key_to_file:
            problem = f"no such key: the files hold {len(self.key_to_file)} others"
            hint = "pass a checkpoint of this model"
            raise WeightsError(str(self.path), f"key {key!r}", problem, hint)
        return self.key_to_file[key]

    def _file(self, name: str) -> SafetensorsFile | PickleFile:
        if name not in self._files:
            path = self.path / name
            check_inside(self.path, path)
            is_pickle = not name.endswith(".safetensors")
            if is_pickle and not self._allow_pickle:
                hint = "convert it to safetensors, or pass allow_pickle=True if you trust it"
                raise WeightsError(str(path), "", "found a pickle, expected safetensors", hint)
            file = PickleFile(path) if is_pickle else SafetensorsFile(path)
            self._check_index(name, file)
            self._files[name] = file
        return self._files[name]

    def _check_index(self, name: str, file: SafetensorsFile | PickleFile) -> None:
        """Raise WeightsError when the index and a file disagree on which keys the file holds."""
        indexed = self._indexed.get(name, set())
        absent = indexed - file.entries.keys()
        twice = (file.entries.keys() & self.key_to_file.keys()) - indexed
        if not absent and not twice:
            return
        file.close()
        problem = "found in this file, but the index places it in another one"
        if absent:
            problem = "the index places it in this file, which does not hold it"
        keys = sorted(absent or twice)
        what = f"key {keys[0]!r}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
        hint = "fetch the index and all files again, of one revision"
        raise WeightsError(str(self.path / name), what, problem, hint)


def open_checkpoint(
    folder: str | os.PathLike[str], allow_pickle: bool = False, stem: str = "model"
) -> CheckpointFolder:
    """Open `model.safetensors`, or the files listed in `model.safetensors.index.json`, in a folder.

    Args:
        folder: local folder; in the Hub cache, the folder of a snapshot.
        allow_pickle: accept `pytorch_model.bin` or its index when there is no safetensors file. It is read with
            `weights_only=True`, and into memory if an old torch wrote it.
        stem: beginning of the file names; "optimizer" opens the optimizer files of `save_checkpoint`.
    """
    path = Path(folder)
    if not path.is_dir():
        raise WeightsError(str(folder), "", "found no such folder", "pass a checkpoint folder")
    names = [f"{stem}.safetensors", index_name(stem)]
    pickles = (f"pytorch_{stem}.bin", f"pytorch_{names[1]}".replace(".safetensors.", ".bin."))
    for name in (*names, *pickles):
        if os.path.lexists(path / name):
            return CheckpointFolder(path, name, allow_pickle)
    found = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
    problem = f"found {found}; expected {' or '.join(names)}"
    raise WeightsError(str(folder), "", problem, f"pass a folder with {names[0]}")
