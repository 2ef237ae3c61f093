"""Open the files of a training checkpoint, check that all belong to the same save, and compare a folder with its checksums."""

import json
from contextlib import AbstractContextManager, ExitStack
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
    damaged_tensors,
    read_checksums,
    require_same_save,
)
from slapo_zoo.weights.folder import CheckpointFolder, open_checkpoint
from slapo_zoo.weights.snapshot import read_whole
from slapo_zoo.weights.training_state import FILE, read_state


@dataclass(frozen=True)
class TrainingFolder(AbstractContextManager["TrainingFolder"]):
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

    @property
    def folders(self) -> list[CheckpointFolder]:
        """Return the opened files of the model and, if there are any, of the optimizer."""
        return [one for one in (self.model, self.optimizer) if one is not None]

    def identity(self) -> str:
        """Return a text that is equal for all ranks that opened the same save."""
        if self.kept is not None:
            return self.kept.save
        return digest(json.dumps([self.state, [one.digest() for one in self.folders]]))

    def check_values(self, part: int = 0, parts: int = 1) -> None:
        """Raise WeightsError when a tensor differs from its checksum; do nothing without checksums.

        Args:
            part: index of the group of tensors that this caller checks, when ranks share the work.
            parts: number of groups.
        """
        if (kept := self.kept) is None:
            return
        for folder in self.folders:
            for damage in damaged_tensors(folder, kept, part, parts):
                raise damage

    def close(self) -> None:
        """Close the files of the model and of the optimizer."""
        for one in self.folders:
            one.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_training(
    path: Path, with_optimizer: bool = True, allow_pickle: bool = False, needs_state: bool = True
) -> TrainingFolder:
    """Open a training checkpoint; check its headers, training state and save ids, but not the values of tensors.

    Args:
        path: folder that `save_checkpoint` wrote.
        with_optimizer: open the optimizer tensors too.
        allow_pickle: accept a `.bin` checkpoint.
        needs_state: raise when there is no training_state.json; False returns an empty `state` for it.

    Raises:
        WeightsError: a file is damaged, or of another save.
    """
    kept = read_checksums(path)
    if kept is not None:
        for damage in damaged_files(path, kept, WEIGHT_FILE):
            raise damage
    state = read_state(path) if needs_state or (path / FILE).exists() else {}
    expected = kept.save if kept is not None else None
    if state and state.get("save") != expected:
        problem = f"found the save id {state.get('save')!r:.40}, expected {expected!r:.40} {'by' if kept else 'without a'} {checksums.FILE}"
        raise WeightsError(str(path / FILE), "save", problem, "copy all files of one save")
    with ExitStack() as stack:
        model = stack.enter_context(open_checkpoint(path, allow_pickle).open_all())
        optimizer = None
        if with_optimizer and any(path.glob("optimizer*.safetensors*")):
            optimizer = stack.enter_context(open_checkpoint(path, stem="optimizer").open_all())
        found = TrainingFolder(state, model, optimizer, kept)
        if kept is not None:
            require_same_save(found.folders, kept)
        stack.pop_all()
    return found


def damages_of(folder: Path) -> tuple[int, list[WeightsError]]:
    """Return (number of tensors, errors): one error for every file and tensor that differs from what was saved.

    Raises:
        WeightsError: the folder is not a checkpoint, or has no checksums.
    """
    return read_whole(folder, lambda: _damages(folder), lambda found: None)


def _damages(folder: Path) -> tuple[int, list[WeightsError]]:
    if not folder.is_dir():
        raise WeightsError(str(folder), "", "found no such folder", "pass a checkpoint folder")
    kept = read_checksums(folder)
    if kept is None:
        hint = "save the model again by slapo_zoo, or rewrite the folder by `slapo-zoo reshard`"
        problem = "found no checksums, nothing can be compared"
        raise WeightsError(str(folder), checksums.FILE, problem, hint)
    found = list(damaged_files(folder, kept))
    opened: list[CheckpointFolder] = []
    try:
        found += _damages_inside(folder, kept, opened)
    except WeightsError as error:
        found = found or [error]  # a consequence of damage already found
    finally:
        for one in opened:
            one.close()
    return sum(len(one.key_to_file) for one in opened), found


def _damages_inside(
    folder: Path, kept: Checksums, opened: list[CheckpointFolder]
) -> list[WeightsError]:
    for name in sorted(kept.tensors):
        opened.append(CheckpointFolder(folder, name))
    require_same_save(opened, kept)
    if (folder / FILE).exists():
        read_state(folder)
    return [damage for one in opened for damage in damaged_tensors(one, kept)]
