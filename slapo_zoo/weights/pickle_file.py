"""A `pytorch_model.bin`, for those who asked for it; the same face as SafetensorsFile."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.header import Entry


class PickleFile:
    """The tensors of a `torch.save`d state dict, read with `weights_only=True`.

    Files of torch >= 1.6 are mapped; older ones are read into memory whole.

    Args:
        path: the file; anything that is no plain state dict of tensors is a WeightsError.

    Attributes:
        entries: as of SafetensorsFile; `start` and `stop` only count up.
        metadata: none.
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
        """Return a tensor as the file has it."""
        return self._tensors[name]

    def read_ahead(self, name: str, first: int, count: int) -> None:
        """Do nothing: where a tensor's bytes lie in the file is not known."""

    def close(self) -> None:
        """Drop the tensors; views that are alive stay valid."""
        self._tensors = {}


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # damaged bytes: torch raises whatever they make it stumble over
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
