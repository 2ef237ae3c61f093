"""Files of a card (a published schedule): allowed names, and reads that refuse links and files above 1 MiB."""

import os
import stat
from pathlib import Path

from slapo_zoo.errors import CardError

PROGRAM, README = "schedule.json", "README.md"
REPORTS = ("verify.json", "bench.json", "tuning.json")
PYTHON = "schedule.py"  # read with trust_remote_code and a sha only
MAX_FILE = 2**20


def names_of(folder: Path) -> list[str]:
    """Return the sorted file names in a card's (published schedule's) folder; CardError for files that no card may have."""
    if not folder.is_dir():
        problem = "no such folder"
        raise CardError("card", str(folder), problem, "pass a folder or org/name@sha")
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".git"))
    known = {PROGRAM, README, *REPORTS}
    strange = [n for n in found if n not in known and not n.endswith(".png") and n != PYTHON]
    if strange:
        hint = f"remove them; a card has {', '.join(sorted(known))} and pictures (.png) only"
        problem = f"found files that do not belong to a card: {', '.join(strange[:5]):.200}"
        raise CardError("card", str(folder), problem, hint)
    return found


def read(folder: Path, name: str, root: Path | None = None) -> bytes:
    """Return the bytes of one file of a card (a published schedule); CardError if it is too large or no regular file.

    Args:
        folder: folder with the card's files.
        name: file name in the folder.
        root: None refuses symbolic links; a directory of the Hub's cache allows links to files below it.
    """
    path = folder / name
    if root is not None:
        path = path.resolve()
        if not path.is_relative_to(root.resolve()):
            problem, hint = "this symbolic link leads out of the Hub cache", "delete it and fetch the card again"  # fmt: skip
            raise CardError("card", str(folder / name), problem, hint)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        link = path.is_symlink()
        problem = "found a symbolic link" if link else f"cannot be read: {error.strerror}"
        hint = "put a regular file that can be read at this path"
        raise CardError("card", str(path), problem, hint) from None
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        os.close(handle)
        problem = "this is a folder or a device, expected a regular file"
        raise CardError("card", str(path), problem, "replace it by a regular file")
    with open(handle, "rb") as file:
        if info.st_size > MAX_FILE:
            problem = f"found {info.st_size} bytes, expected at most {MAX_FILE}"
            raise CardError("card", str(path), problem, "move large files out of the card")
        return file.read(MAX_FILE + 1)
