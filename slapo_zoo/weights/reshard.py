"""Rewrite a checkpoint with other file sizes or another dtype, with one tensor in memory at a time.

Checkpoints hold unsharded tensors and fit every mesh; only their distribution over files changes. The optimizer
of a training checkpoint is rewritten too, in its own dtype.
"""

import functools
import json
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights.carry import WEIGHT_FILE
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.ledger import OnBytes, byte_progress
from slapo_zoo.weights.load_rank_slices import FLOATS, to_dtype
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.snapshot import read_whole
from slapo_zoo.weights.training_folder import TrainingFolder, open_training
from slapo_zoo.weights.training_state import write_state


@dataclass(frozen=True)
class Unread:
    """Placeholder of a tensor to be saved: only `detach` reads it from a checkpoint and converts it, by `read`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def detach(self) -> Tensor:
        """Read, convert and return the tensor. The save calls `detach` once, when it writes the tensor."""
        return self.read()


def reshard(
    source: Path, target: Path, max_shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None, allow_pickle: bool = False,
) -> None:  # fmt: skip
    """Rewrite the checkpoint of a folder into another folder, or in place. The target appears or changes by one rename;
    files that are not weights are copied, too.

    Args:
        source: checkpoint folder, also of `save_checkpoint`.
        target: a new folder, an older checkpoint, or `source` itself.
        max_shard_size: largest file, "5GB" or bytes.
        dtype: new dtype, or its name, of the model's floating tensors, except 8-bit floats; None keeps theirs.
        allow_pickle: accept a `.bin` checkpoint.
    """
    dtype = None if dtype is None else to_dtype(dtype, "reshard")
    with ExitStack() as stack:
        opened = stack.enter_context(read_whole(
            source, lambda: open_training(source, allow_pickle=allow_pickle, needs_state=False), TrainingFolder.close
        ))  # fmt: skip
        opened.check_values()
        model, optimizer = opened.model, opened.optimizer
        specs = [_spec(model, key, dtype) for key in model.key_to_file]
        beside = [_spec(optimizer, key, None) for key in optimizer.key_to_file] if optimizer else []
        total = sum(math.prod(s.shape) * getattr(torch, s.dtype).itemsize for s in specs + beside)
        done = stack.enter_context(byte_progress("writing", total))
        local: dict[str, Any] = {spec.name: _unread(model, spec, done) for spec in specs}
        if optimizer is not None:
            local |= {spec.name: _unread(optimizer, spec, done) for spec in beside}
        save_folder(
            target, specs, local, Mesh(),
            write_extras=functools.partial(_write_others, source, dtype, opened.state),
            max_shard_size=max_shard_size, beside={"optimizer": beside} if beside else None,
            stamp=opened.kept.save if opened.kept is not None else "",
        )  # fmt: skip


def _spec(folder: CheckpointFolder, key: str, dtype: torch.dtype | None) -> TensorSpec:
    found = folder.dtype(key)
    new = dtype if dtype is not None and found in FLOATS else found
    return TensorSpec(key, folder.shape(key), str(new).removeprefix("torch."))


def _unread(folder: CheckpointFolder, spec: TensorSpec, done: OnBytes) -> Unread:
    dtype = getattr(torch, spec.dtype)

    def read() -> Tensor:
        tensor = folder.view(spec.name).to(dtype)
        done(tensor.nbytes)
        return tensor

    return Unread(spec.shape, dtype, read)


def _write_others(
    source: Path, dtype: torch.dtype | None, state: dict[str, Any], folder: Path, save: str
) -> None:
    """Copy the files that are not weights into `folder`; set `dtype` in config.json, and the new
    save's id `save` in `state`, which is written as training_state.json unless empty.
    """
    for item in source.iterdir():
        if WEIGHT_FILE.fullmatch(item.name):
            continue
        if item.is_dir():
            shutil.copytree(item, folder / item.name, symlinks=True)
        elif item.is_file():
            shutil.copy2(item, folder / item.name)
    if state:
        write_state(folder, {**state, "save": save})
    config = folder / "config.json"
    if dtype is not None and config.exists():
        content = json.loads(config.read_text(encoding="utf-8"))
        content.pop("torch_dtype", None)
        content["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
