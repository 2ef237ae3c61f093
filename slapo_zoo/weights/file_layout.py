"""Plan the files of a checkpoint before any byte is written: which tensor goes where, headers and index."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights.index import index_name
from slapo_zoo.weights.safetensors_file import DTYPES

CODES = {dtype: code for code, dtype in DTYPES.items()}
ORDER = {dtype: i for i, dtype in enumerate(DTYPES.values())}


class Slot(NamedTuple):
    """Position of a tensor in a checkpoint: name of a file, and offset of the tensor's first byte in that file."""

    file: str
    start: int


@dataclass(frozen=True)
class Layout:
    """Files of a checkpoint, and the position of every tensor in them.

    Args:
        headers: file name --> its first bytes: length field and JSON header.
        sizes: file name --> its size in bytes.
        slots: tensor name --> its file and offset.
        indexes: name of an index (`model.safetensors.index.json`) --> its text; empty when the tensors fit into
            a single file.
    """

    headers: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    indexes: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: "Layout") -> "Layout":
        """Return the union of two layouts, e.g. of model and optimizer; a tensor in both raises WeightsError."""
        if twice := self.slots.keys() & other.slots.keys():
            problem = f"model and optimizer both save a tensor of this name ({len(twice)} in all)"
            raise WeightsError("save", min(twice), problem, "rename the module or parameter")
        return Layout(
            self.headers | other.headers, self.sizes | other.sizes, self.slots | other.slots,
            self.indexes | other.indexes,
        )  # fmt: skip


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of the tensor that `spec` describes; raise WeightsError when safetensors cannot hold it."""
    dtype = getattr(torch, spec.dtype, None)
    if dtype not in CODES:
        problem = f"found dtype {spec.dtype!r}, expected one that safetensors can hold"
        hint = f"convert it to one of {', '.join(map(str, CODES))}"
        raise WeightsError("save", spec.name, problem, hint)
    return dtype


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the bytes that the unsharded tensor with the shape and dtype of `spec` takes in a file."""
    return math.prod(spec.shape) * torch_dtype(spec).itemsize


def plan_layout(
    specs: Sequence[TensorSpec],
    max_shard_size: int | str,
    metadata: Mapping[str, str],
    stem: str = "model",
) -> Layout:
    """Return which file each tensor goes to, as `save_pretrained` of transformers decides, and at which offset.

    Args:
        specs: name, unsharded shape and dtype of each tensor of the model, in state-dict order.
        max_shard_size: largest file, "5GB" or bytes; a larger tensor gets a file of its own.
        metadata: `__metadata__` of every file.
        stem: beginning of the file names, e.g. "model".
    """
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) < len(specs) or not specs:
        problem = f"found {len(specs)} tensors with {len(by_name)} names, expected one or more, each with its own name"
        hint = "give each parameter a name of its own; a model without tensors cannot be saved"
        raise WeightsError("save", f"tensors for {stem}*.safetensors", problem, hint)
    state = {s.name: torch.empty(s.shape, dtype=torch_dtype(s), device="meta") for s in specs}
    pattern = f"{stem}{{suffix}}.safetensors"
    try:
        if str(max_shard_size).strip().startswith(("-", "True", "False", "None")):
            raise ValueError("expected a size above 0")
        split = split_torch_state_dict_into_shards(
            state, filename_pattern=pattern, max_shard_size=max_shard_size
        )
    except ValueError as error:
        problem = f"found {max_shard_size!r}: {error}"
        raise WeightsError("save", "max_shard_size", problem, 'pass e.g. "5GB"') from error
    headers, sizes, slots = {}, {}, {}
    for file, names in split.filename_to_tensors.items():
        specs_of_file = [by_name[name] for name in names]  # wide dtypes first: each is aligned
        ordered = sorted(specs_of_file, key=lambda spec: (-ORDER[torch_dtype(spec)], spec.name))
        headers[file] = header = _header(ordered, metadata)
        end = len(header)
        for spec in ordered:
            slots[spec.name] = Slot(file, end)
            end += tensor_bytes(spec)
        sizes[file] = end
    counts = {"total_parameters": sum(math.prod(spec.shape) for spec in specs)}
    index = {"metadata": {**counts, **split.metadata}, "weight_map": split.tensor_to_filename}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    indexes = {index_name(stem): text} if split.is_sharded else {}
    return Layout(headers, sizes, slots, indexes)


def _header(specs: list[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file (length field and JSON), padded to a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for spec in specs:
        start, end = end, end + tensor_bytes(spec)
        code = CODES[torch_dtype(spec)]
        header[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
