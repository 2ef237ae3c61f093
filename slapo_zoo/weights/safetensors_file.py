"""Read a safetensors file as tensors over its mapped pages, also in pieces; the safetensors library checks its header.

file = 8 bytes little-endian length n | n bytes JSON header | tensor data without holes
"""

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slapo_zoo.errors import WeightsError

MAX_HEADER = 100_000_000
SAVE_ID = "slapo_zoo_save"  # key of `__metadata__`: which save wrote the file

# In the order of the format's own enumeration, by which writers sort tensors.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}

# Files often passed by mistake: first bytes --> hint.
FOREIGN = {
    b"version ": "it is a Git LFS pointer: run `git lfs pull` in the repository",
    b"PK\x03\x04": "it is a PyTorch pickle under another name: convert it to safetensors",
    b"\x80": "it is a pickle under another name: convert it to safetensors",
    b"GGUF": "it is a GGUF file: pass the original safetensors checkpoint",
    b"<": "it is a web page: the download failed, fetch the file again",
    b"\x89HDF": "it is an HDF5 file (Keras): convert it to safetensors",
}


class Entry(NamedTuple):
    """One tensor of a safetensors file; `start` and `stop` are byte offsets from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """Content of a safetensors header: {tensor name: Entry} in the order of the data, and `__metadata__`."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: BinaryIO) -> Header:
    """Return the header of an open safetensors file, once the safetensors library has checked all of it.

    The library checks length, JSON, names, dtypes, shapes, and that the tensors cover the data without gap or
    overlap. Anything malformed raises WeightsError.
    """
    path, head = str(file.name), file.read(8)
    try:
        with safe_open(path, "numpy") as checked:
            slices = {name: checked.get_slice(name) for name in checked.offset_keys()}
            metadata = checked.metadata() or {}
        is_same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (SafetensorError, OSError) as error:
        hints = (hint for magic, hint in FOREIGN.items() if head.startswith(magic))
        hint = next(hints, "fetch the file again, or save the checkpoint again")
        found = f"found {os.fstat(file.fileno()).st_size} bytes that are not a complete safetensors file"
        raise WeightsError(path, "", f"{found}: {error}", hint) from error
    if not is_same:
        raise WeightsError(path, "", "the file was replaced while it was opened", "load it again")
    entries: dict[str, Entry] = {}
    end = 8 + int.from_bytes(head, "little")
    for name, held in slices.items():  # in the order of their bytes, without holes
        start, shape = end, tuple(held.get_shape())
        dtype = _dtype(path, name, held.get_dtype())
        end += math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, shape, start, end)
    return Header(entries, metadata)


def _dtype(path: str, name: str, code: str) -> torch.dtype:
    if code not in DTYPES:
        problem = f"found dtype {code}, expected one of {', '.join(DTYPES)}"
        hint = "convert the tensor to a dtype that torch knows"
        raise WeightsError(path, f"tensor {name!r}", problem, hint)
    return DTYPES[code]


class SafetensorsFile(contextlib.AbstractContextManager["SafetensorsFile"]):
    """A validated safetensors file; only the header is read until a view is used.

    Args:
        path: the file; anything that is not a well-formed safetensors file raises WeightsError.

    Attributes:
        entries: tensor name --> Entry(dtype, shape, start, stop), offsets from the file's start.
        metadata: the `__metadata__` of the header.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._pages: mmap.mmap | None = None
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            problem, hint = f"cannot be opened: {error.strerror}", "check the path and its rights"
            raise WeightsError(str(path), "", problem, hint) from error
        try:
            self.entries, self.metadata = read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def view(self, name: str) -> Tensor:
        """Return a tensor over the file's pages, in the file's shape and dtype; bytes are read on first use.

        The mapping is private: writing to the view copies the page and leaves the file unchanged. The mapping
        lives until its last tensor is freed, also after `close`, and may be larger than memory.
        """
        return self.piece(name, 0, self.entries[name].shape)

    def piece(self, name: str, first: int, shape: Sequence[int]) -> Tensor:
        """Return some elements of tensor `name` as a tensor of `shape` over the file's pages.

        The elements begin at number `first` in row-major order. The result has a storage of its own with these
        elements alone, because `torch.save` writes whole storages.
        """
        dtype, _, start, stop = self.entries[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = os.fstat(self._file.fileno()).st_size
        if size < stop:  # reading a page beyond the end kills the process
            problem = f"found {size} bytes, expected {stop}: the file was truncated after it had been opened"
            hint = "load it when no other process writes it, or fetch the file again"
            raise WeightsError(str(self.path), f"tensor {name!r}", problem, hint)
        if self._pages is None:  # shared: each mapping keeps a file descriptor
            # The default advice measured best: MADV_RANDOM is 6 to 25 times slower on a cold file.
            self._pages = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_COPY)
        offset = start + first * dtype.itemsize
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=offset).view(shape)

    def read_ahead(self, name: str, first: int, count: int) -> None:
        """Ask the operating system to prefetch `count` bytes of a tensor, from byte `first` of its data."""
        fileno, start = self._file.fileno(), self.entries[name].start + first
        # For cached data the kernel would still visit every page: 9 ms per GB.
        is_there = _is_cached(fileno, start) and _is_cached(fileno, start + count - 1)
        if not is_there and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # only advice: not every file system supports it
                os.posix_fadvise(fileno, start, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file; views made before stay valid."""
        self._file.close()
        self._pages = None

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_cached(fileno: int, place: int) -> bool:
    """Return whether the byte at offset `place` of an open file is in the page cache."""
    try:
        return os.preadv(fileno, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):  # not on Linux, not in memory, or the file system cannot tell
        return False
