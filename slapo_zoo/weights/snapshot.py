"""Read a consistent state of a folder that another job may replace at any time."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.digests import unlike
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.weights.staging import bring_back

T = TypeVar("T")
TRIES = 20
PAUSE_S = 0.05


def read_whole(folder: Path, read: Callable[[], T], close: Callable[[T], None]) -> T:
    """Return the result of `read` on a folder that was not replaced meanwhile; retry otherwise.

    A save swaps folders. If the path still leads to the same folder (held open) after `read` has opened all its
    files, these files belong together and stay readable.

    Args:
        folder: folder that a save may replace.
        read: opens every file that it will need, and returns e.g. an object that holds the open files.
        close: closes the result of a `read` that mixed two folders.
    """
    for _ in range(TRIES):
        try:
            held = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except PermissionError as error:
            raise WeightsError(str(folder), "", f"cannot be read: {error.strerror}", "check its rights") from error  # fmt: skip
        except OSError:
            if is_missing(folder):
                return read()  # raises its own error
            continue
        try:
            found = read()
            if _is(folder, held):
                return found
            close(found)
        except Exception:
            if _is(folder, held):
                raise
        finally:
            os.close(held)
    problem = f"the folder was replaced {TRIES} times while it was read"
    raise WeightsError(str(folder), "", problem, "save less often, or read a copy")


def is_missing(folder: Path) -> bool:
    """Return whether a folder is still missing after a killed save's moved folder was moved back, and a short wait."""
    if not folder.is_dir():
        bring_back(folder)
        time.sleep(PAUSE_S)
    return not folder.is_dir()


def _is(folder: Path, held: int) -> bool:
    try:
        now, then = os.stat(folder), os.fstat(held)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)


def read_by_all(
    mesh: Mesh, what: str, folder: Path, read: Callable[[], T], identity: Callable[[T], str],
    close: Callable[[T], None],
) -> T:  # fmt: skip
    """Return what `read` returns here, retried until all ranks have read the same save; a collective call. WeightsError
    is raised if ranks differ in every one of 20 tries (TRIES).

    Args:
        mesh: mesh of all ranks.
        what: name of the calling step, for errors.
        folder: folder on a file system that all ranks share, or a copy of it on each.
        read: opens every file that it will need, and returns e.g. an object that holds the open files.
        identity: returns, for a result of `read`, a text that is equal for files of the same save.
        close: closes a result of `read` that is not returned.
    """
    mine: list[T] = []
    found: list[str] = []

    def once() -> str:
        mine[:] = [read_whole(folder, read, close)]
        return identity(mine[0])

    for _ in range(TRIES):
        try:
            found = together(mesh, what, once)
        except BaseException:
            for one in mine:
                close(one)
            raise
        if len(set(found)) == 1:
            return mine[0]
        close(mine.pop())
        time.sleep(PAUSE_S)
    differ = unlike(found)
    problem = f"ranks {differ} read other files than rank 0"
    hint = "give all ranks the same revision, or a folder on a file system that they share"
    raise WeightsError(what, str(folder), problem, hint)
