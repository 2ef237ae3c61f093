"""Open the files of a training checkpoint, and check that all belong to the same save."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.digests import digest
from slapo_zoo.weights import checksums
from slapo_zoo.weights.carry import WEIGHT_FILE
from slapo_zoo.weights.checksums import (
    Checksums,
    damaged_files,
    raise_first,
    read_checksums,
    require_same_save,
)
from slapo_zoo.weights.folder import CheckpointFolder, open_checkpoint
from slapo_zoo.weights.training_state import FILE, read_state


@dataclass(frozen=True)
class TrainingFolder:
    """Open files of a training checkpoint; they stay readable when the folder is replaced.

    Args:
        state: content of training_state.json.
        model: model weights.
        optimizer: optimizer tensors; None when not requested or not saved.
        kept: checksums; None for a checkpoint of an older version, which wrote no checksums.
    """

    state: dict[str, Any]
    model: CheckpointFolder
    optimizer: CheckpointFolder | None
    kept: Checksums | None

    def identity(self) -> str:
        """Return a text that is equal for all ranks that opened the same save."""
        if self.kept is not None:
            return self.kept.save
        digests = [one.digest() for one in (self.model, self.optimizer) if one is not None]
        return digest(json.dumps([self.state, digests]))

    def close(self) -> None:
        """Close the files of the model and of the optimizer."""
        for one in (self.model, self.optimizer):
            if one is not None:
                one.close()

    def __enter__(self) -> "TrainingFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_training(path: Path, with_optimizer: bool = True) -> TrainingFolder:
    """Open a training checkpoint and check everything but the values of tensors.

    Args:
        path: folder that `save_checkpoint` wrote.
        with_optimizer: open the optimizer tensors too.

    Raises:
        WeightsError: a file is damaged, or of another save.
    """
    kept = read_checksums(path)
    if kept is not None:
        raise_first(damaged_files(path, kept, WEIGHT_FILE))
    state = read_state(path)
    expected = kept.save if kept is not None else None
    if state.get("save") != expected:
        problem = f"found {state.get('save')!r:.40}, but {checksums.FILE} has {expected!r:.40}"
        raise WeightsError(str(path / FILE), "save", problem, "take the whole folder of one save")
    opened: list[CheckpointFolder] = []
    try:
        opened.append(open_checkpoint(path).open_all())
        if with_optimizer and any(path.glob("optimizer*.safetensors*")):
            opened.append(open_checkpoint(path, stem="optimizer").open_all())
        if kept is not None:
            require_same_save(opened, kept)
    except BaseException:
        for one in opened:
            one.close()
        raise
    return TrainingFolder(state, opened[0], opened[1] if len(opened) > 1 else None, kept)
