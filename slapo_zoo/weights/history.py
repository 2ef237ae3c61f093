"""Several checkpoints of one training in a folder: `step-00000100`, ..., and `last`, a link to the newest."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from slapo_zoo.weights.staging import bring_back
from slapo_zoo.weights.training_state import FILE

LAST = "last"
STEP = re.compile(r"step-\d{8,}")


def latest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from, or None if there is no checkpoint.

    The result is the first of these that holds a checkpoint: the target of the link `last`, `folder` itself, the newest
    step folder. A folder that a killed save had moved away is moved back first.
    """
    if (folder / LAST).is_symlink():
        linked = folder / os.readlink(folder / LAST)
        bring_back(linked)
        if (linked / FILE).exists():
            return linked
    bring_back(folder)
    if (folder / FILE).exists():
        return folder
    return next((path for path in reversed(steps_in(folder)) if (path / FILE).exists()), None)


def steps_in(folder: Path) -> list[Path]:
    """Return the step folders (`step-00000100`) in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def is_history(folder: Path) -> bool:
    """Return whether a folder contains only step folders (`step-00000100`) and the link `last` to one of them."""
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    return bool(names) and all(name == LAST or STEP.fullmatch(name) for name in names)


def place_of(folder: Path, step: int, keep: int | None) -> Path:
    """Return the folder for the checkpoint of a step: `folder`, or a step folder in `folder` if `folder` is a history.

    A history is a folder of several saves: it has the link `last`, or `keep`, the number of saves to keep, is given.
    """
    has_history = keep is not None or (folder / LAST).is_symlink()
    return folder / f"step-{step:08d}" if has_history else folder


def keep_newest(folder: Path, saved: Path, keep: int | None) -> None:
    """Point the link `last` in `folder` to its step folder `saved`, and delete all but the newest `keep` step folders;
    `keep` None deletes none. Called by one rank; does nothing if `saved` is `folder` itself.
    """
    if saved == folder:
        return
    link = folder / f".{LAST}.{os.getpid()}"
    with suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(saved.name)
    os.replace(link, folder / LAST)
    older = [path for path in steps_in(folder) if path.name != saved.name]
    for path in older[: max(0, len(older) + 1 - keep)] if keep is not None else ():
        shutil.rmtree(path, ignore_errors=True)
