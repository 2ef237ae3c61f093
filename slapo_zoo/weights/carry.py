"""What a person keeps beside the weights survives a save: tokenizer, README, subfolders."""

import contextlib
import os
import re
import shutil
from pathlib import Path

# The files that a save replaces: the weights of the model and what belongs to just these weights.
WEIGHT_FILE = re.compile(
    r"(model|pytorch_model|optimizer)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|training_state\.json"
)


def carry_over(old: Path, new: Path) -> None:
    """Bring all files of `old` but its weights into `new`, except those that `new` has already.

    Files are linked where the file system can: that is quick for large ones, and a log that some
    process still writes to goes on in the new folder.
    """
    for item in old.iterdir():
        if not WEIGHT_FILE.fullmatch(item.name):
            _carry(item, new / item.name)


def _carry(item: Path, place: Path) -> None:
    if item.is_dir() and not item.is_symlink():
        if os.path.lexists(place) and not place.is_dir():
            return
        place.mkdir(exist_ok=True)
        for child in item.iterdir():
            _carry(child, place / child.name)
        shutil.copystat(item, place)
    elif not os.path.lexists(place):
        try:
            os.link(item, place, follow_symlinks=False)
        except OSError:
            with contextlib.suppress(shutil.SpecialFileError):  # sockets and pipes
                shutil.copy2(item, place, follow_symlinks=False)
