"""Read a safetensors file as tensors over its mapped pages."""

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.header import read_header


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
            raise WeightsError(str(path), "", f"cannot be opened: {error.strerror}") from error
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
        """Return a tensor over the file's pages, of the given shape from element `first` on, with its own storage.

        The storage ends with the tensor, because `torch.save` writes whole storages.
        """
        dtype, _, start, stop = self.entries[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = os.fstat(self._file.fileno()).st_size
        if size < stop:  # reading a page beyond the end kills the process
            problem = f"found {size} bytes, expected {stop}: it was cut after it had been opened"
            hint = "does another process write it? fetch the file again"
            raise WeightsError(str(self.path), f"tensor {name!r}", problem, hint)
        if self._pages is None:  # shared: each mapping keeps a file descriptor
            # The default advice measured best: MADV_RANDOM is 6 to 25 times slower on a cold file.
            self._pages = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_COPY)
        offset = start + first * dtype.itemsize
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=offset).view(shape)

    def read_ahead(self, name: str, first: int, count: int) -> None:
        """Ask the kernel to prefetch `count` bytes of a tensor, from byte `first` of its data."""
        fileno, start = self._file.fileno(), self.entries[name].start + first
        # For cached data the kernel would still visit every page: 9 ms per GB.
        is_there = _is_cached(fileno, start) and _is_cached(fileno, start + count - 1)
        if not is_there and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # only advice: not every file system supports it
                os.posix_fadvise(fileno, start, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file; existing views stay valid."""
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
