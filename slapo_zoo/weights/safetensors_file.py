"""One safetensors file as tensors over its mapped pages."""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.header import read_header


class SafetensorsFile:
    """A validated safetensors file; nothing is read but the header until a view is used.

    Args:
        path: the file; anything that is not a well-formed safetensors file is a WeightsError.

    Attributes:
        entries: tensor name --> Entry(dtype, shape, start, stop), offsets from the file's start.
        metadata: the `__metadata__` of the header.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
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
        """A tensor over the file's pages, of the file's shape and dtype; no byte is read yet.

        Every view has a private map of its own, so a file larger than memory can be opened, and
        the map goes with the last tensor that uses it, also after `close`. Writing to the view
        copies the page and leaves the file as it is.
        """
        dtype, shape, start, stop = self.entries[name]
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        begin = start - start % mmap.ALLOCATIONGRANULARITY
        fileno = self._file.fileno()
        if (
            size := os.fstat(fileno).st_size
        ) < stop:  # a page beyond the end would kill the process
            problem = f"found {size} bytes, expected {stop}: it was cut after it had been opened"
            hint = "does another process write it? fetch the file again"
            raise WeightsError(str(self.path), f"tensor {name!r}", problem, hint)
        # The default advice measured best: MADV_RANDOM is 6 to 25 times slower on a cold file.
        pages = mmap.mmap(fileno, stop - begin, access=mmap.ACCESS_COPY, offset=begin)
        count = (stop - start) // dtype.itemsize
        flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=start - begin)
        return flat.reshape(shape)

    def close(self) -> None:
        """Close the file; views that are alive stay valid."""
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
