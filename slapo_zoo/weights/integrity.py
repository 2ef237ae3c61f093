"""Check a checkpoint folder against its checksums, without a model."""

from pathlib import Path

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.checksums import (
    FILE,
    Checksums,
    damaged_files,
    damaged_tensors,
    read_checksums,
    require_same_save,
)
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.snapshot import read_whole
from slapo_zoo.weights.training_state import FILE as STATE
from slapo_zoo.weights.training_state import read_state


def damages_of(folder: Path) -> tuple[int, list[WeightsError]]:
    """Return (number of tensors, errors): one error for every file and tensor that differs from what was saved.

    Raises:
        WeightsError: the folder is not a checkpoint, or has no checksums.
    """
    return read_whole(folder, lambda: _damages(folder), lambda found: None)


def _damages(folder: Path) -> tuple[int, list[WeightsError]]:
    if not folder.is_dir():
        raise WeightsError(str(folder), "", "found no such folder", "name a checkpoint folder")
    kept = read_checksums(folder)
    if kept is None:
        hint = "save the model again by slapo_zoo, or rewrite the folder by `slapo-zoo reshard`"
        raise WeightsError(str(folder), FILE, "found no checksums, nothing can be compared", hint)
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
    if (folder / STATE).exists():
        read_state(folder)
    return [damage for one in opened for damage in damaged_tensors(one, kept)]
