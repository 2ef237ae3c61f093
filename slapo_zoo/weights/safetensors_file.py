"""Read a safetensors file as tensors over its mapped pages; its header is checked in full before a byte of data is used.

file = 8 bytes little-endian length n | n bytes JSON header | tensor data without holes
"""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError

MAX_HEADER = 100_000_000
SAVE_ID = "slapo_zoo_save"  # key of `__metadata__`: which save wrote the file
MAX_ELEMENTS = 2**63 - 1

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
    """Content of a safetensors header: tensor name --> Entry in the order of the header, and `__metadata__`."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: BinaryIO) -> Header:
    """Parse and check the header of an open safetensors file; anything malformed raises WeightsError.

    Checked: length, JSON, names, dtypes, shapes, and that the tensors cover the data without gap or overlap.
    """
    path, size = str(file.name), os.fstat(file.fileno()).st_size
    length = _length(path, file.read(8), size)
    header = _parse(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    is_text = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_text:
        raise _error(path, "__metadata__", f"found {metadata!r:.80}, expected texts by name")
    if strange := next((name for name in header if not _is_unicode(name)), None):
        problem = f"found the name {ascii(strange)[:80]}, half of a surrogate pair and no text"
        raise _error(path, "", problem)
    data = 8 + length
    entries = {name: _entry(path, name, spec, data) for name, spec in header.items()}
    _check_layout(path, entries, data, size)
    return Header(entries, metadata)


def _error(path: str, name: str, problem: str, hint: str = "") -> WeightsError:
    again = "fetch the file again, or save the checkpoint again"
    return WeightsError(path, name and f"tensor {name!r}", problem, hint or again)


def _length(path: str, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise _error(path, "", f"truncated: found {size} bytes, expected at least 8")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER:
        problem = f"found a header of {length} bytes, expected at most {MAX_HEADER}"
        hints = (hint for magic, hint in FOREIGN.items() if head.startswith(magic))
        raise _error(path, "", problem, next(hints, "it is not a safetensors file"))
    if 8 + length > size:
        problem = f"truncated: found {size} bytes, expected {8 + length} for the header alone"
        raise _error(path, "", problem)
    return length


def _parse(path: str, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise _error(path, name, "found twice in the header, expected once")
            found[name] = value
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except WeightsError:
        raise
    except (ValueError, RecursionError) as error:
        raise _error(path, "", f"found a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _error(path, "", f"found a JSON {type(header).__name__}, expected an object")
    return header


def _entry(path: str, name: str, spec: Any, data: int) -> Entry:
    """Check and return the header entry of one tensor; `data` is the file offset at which tensor data start."""
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise _error(path, name, f"found {spec!r:.80}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problem = f"found dtype {dtype!r:.40}, expected one of {', '.join(DTYPES)}"
        raise _error(path, name, problem, "convert the tensor to a dtype that torch knows")
    if not _counts(shape) or math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise _error(path, name, f"found shape {shape!r:.80}, expected a list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, name, f"found data_offsets {offsets!r:.80}, expected [start, stop]")
    found, expected = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
    if found != expected:
        problem = f"found {found} bytes, expected {expected} for {dtype} of shape {shape!r:.80}"
        raise _error(path, name, problem)
    return Entry(DTYPES[dtype], tuple(shape), data + offsets[0], data + offsets[1])


def _check_layout(path: str, entries: dict[str, Entry], data: int, size: int) -> None:
    """Raise WeightsError unless tensors cover bytes `data`..`size` of a file exactly: no hole, no overlap, none beyond."""
    end, previous = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.stop > size:
            problem = f"truncated: found {size} bytes, expected at least {entry.stop}"
            raise _error(path, name, problem)
        if entry.start != end:
            kind = "lies over" if entry.start < end else "leaves a hole after"
            problem = f"{kind} {previous}: found start {entry.start}, expected {end}"
            raise _error(path, name, problem)
        end, previous = entry.stop, repr(name)
    if end != size:
        raise _error(path, "", f"found {size} bytes, expected {end}: bytes are left over")


def _is_unicode(name: str) -> bool:
    """Return whether a name can be encoded as UTF-8: JSON allows half of a surrogate pair, UTF-8 does not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _counts(found: Any) -> bool:
    """Return whether `found` is a list of non-negative integers."""
    return isinstance(found, list) and all(type(item) is int and item >= 0 for item in found)


class SafetensorsFile:
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

        The mapping is private: writing to the view copies the page and leaves the file unchanged. It lives
        until its last tensor is freed, also after `close`, and may be larger than memory.
        """
        return self.piece(name, 0, self.entries[name].shape)

    def piece(self, name: str, first: int, shape: Sequence[int]) -> Tensor:
        """Return elements of a tensor as a tensor of `shape` over the file's pages, with a storage of its own.

        It begins at element `first` of the tensor `name` in row-major order.

        The storage ends with the tensor, because `torch.save` writes whole storages.
        """
        dtype, _, start, stop = self.entries[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = os.fstat(self._file.fileno()).st_size
        if size < stop:  # reading a page beyond the end kills the process
            problem = f"found {size} bytes, expected {stop}: the file was truncated after it had been opened"
            hint = "does another process write it? fetch the file again"
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

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_cached(fileno: int, place: int) -> bool:
    """Return whether the byte at offset `place` is in the page cache."""
    try:
        return os.preadv(fileno, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):  # not on Linux, not in memory, or the file system cannot tell
        return False
