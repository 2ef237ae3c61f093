"""Read a `pytorch_model.bin` (only if allowed by the user), with the interface of SafetensorsFile."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.header import Entry


class PickleFile:
    """Tensors of a `torch.save`d state dict, read with `weights_only=True`.

    Files of torch >= 1.6 are mapped; older ones are read into memory.

    Args:
        path: the file; anything but a plain state dict of tensors raises WeightsError.

    Attributes:
        entries: tensor name --> Entry with dtype and shape; `start` and `stop` are no file offsets.
        metadata: always empty.
    """

    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, path: Path):
        self._tensors = _load(path)
        self.entries: dict[str, Entry] = {}
        start = 0
        for name, tensor in self._tensors.items():
            stop = start + tensor.numel() * tensor.itemsize
            self.entries[name] = Entry(tensor.dtype, tuple(tensor.shape), start, stop)
            start = stop

    def view(self, name: str) -> Tensor:
        """Return a tensor in the file's shape and dtype."""
        return self._tensors[name]

    def read_ahead(self, name: str, first: int, count: int) -> None:
        """Do nothing: the offset of a tensor in a pickle is unknown."""

    def close(self) -> None:
        """Drop the tensors; existing views stay valid."""
        self._tensors = {}


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch raises many types on damaged bytes
        problem = f"found no plain state dict: {str(error).partition(chr(10))[0]:.200}"
        hint = "fetch the file again; a pickle that holds more than tensors is never loaded"
        raise WeightsError(str(path), "", problem, hint) from error
    if not isinstance(found, dict):
        problem = f"found a {type(found).__name__}, expected tensors by name"
        raise WeightsError(str(path), "", problem)
    strange = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if strange:
        problem = f"found a {type(found[strange[0]]).__name__}, expected a tensor"
        raise WeightsError(str(path), f"key {strange[0]!r}", problem, "save the state dict alone")
    return {name: value.detach() for name, value in found.items()}
