"""Replace a folder atomically: it is built beside its target, then swapped with it."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.carry import TOKENIZER_FILE, WEIGHT_FILE, carry_over

BLINK_S = 0.5
TURN_S = 60.0  # longest wait for another save to publish
LEFT_S = 86400.0  # without locks, older folders are remains of killed saves
AT_FDCWD, RENAME_EXCHANGE = -100, 2


class Staging:
    """Temporary folder of one save; used by one rank.

    Args:
        target: absolute path of the folder to be published.
        mark: name of a file that an older folder at `target` must contain, which may hold no model; None: it must hold
            a model. `create` raises WeightsError otherwise.
        replaced: pattern of names of files that are dropped with the older folder; its other files are kept.

    Attributes:
        path: hidden sibling of the target, which `create` makes.
    """

    def __init__(
        self, target: Path, mark: str | None = None, replaced: re.Pattern[str] = WEIGHT_FILE
    ):
        self.target, self._mark, self._replaced = target, mark, replaced
        self.path = _sibling(target, "partial")
        self._lock = -1

    def create(self) -> None:
        """Create the folder `path`; delete those of killed saves (no process locks them); WeightsError by the rule of `mark`."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.target.parent):  # else another save may delete it before its lock
            _sweep(self.target)
            check_target(self.target, self._mark)
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY)
            _has_locked(self._lock)

    def publish(self) -> None:
        """Keep the target's files that the save does not replace, then swap the temporary folder with the target.

        At every moment a reader finds either the whole old folder or the whole new one.
        """
        _sync_tree(self.path)  # before taking the lock
        with _locked(self.target.parent):  # one publication at a time
            if not self.target.exists():
                os.rename(self.path, self.target)
            else:
                carry_over(self.target, self.path, self._replaced)
                shutil.copymode(self.target, self.path)
                _sync_tree(self.path)
                _exchange(self.path, self.target)
            _sync(self.target.parent)

    def discard(self) -> None:
        """Delete the temporary folder, which after `publish` holds the old content."""
        if self._lock >= 0:
            _unlock(self._lock)
            self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Context that holds a lock on the folder `parent`, so that saves into its subfolders publish one at a time.

    If the file system has no locks, or another save holds the lock for over TURN_S (60) seconds, the block runs unlocked.
    """
    lock, end = os.open(parent, os.O_RDONLY), time.monotonic() + TURN_S
    try:
        while not _has_locked(lock) and time.monotonic() < end:
            time.sleep(0.01)
        yield
    finally:
        _unlock(lock)


def _has_locked(lock: int) -> bool:
    """Try to lock the open file `lock` (a descriptor); return False if another process has locked it, else True."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have none
        return True
    return True


def _unlock(lock: int) -> None:
    """Release and close a lock explicitly, because a forked child may still have it open."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _sibling(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(4)}"


def resolved(folder: Any) -> Path:
    """Return a user's path as an absolute Path without links; WeightsError if it is none: links in a circle, None."""
    try:
        return Path(folder).resolve()
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        problem = f"cannot be used as a folder: {error}"
        raise WeightsError(str(folder), "", problem, "pass another path") from error


def check_target(target: Path, mark: str | None = None, option: str = "") -> None:
    """Raise WeightsError when a target exists and may be something else than a checkpoint.

    Args:
        target: folder that a save would replace.
        mark: name of a file that the folder must contain; None: it must be the folder of a model.
        option: name of the option that gave the target, for errors.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        problem = "found a file, expected a folder"
        raise WeightsError(str(target), option, problem, "pass another path")
    hint = "pass a new folder, e.g. one below it"
    if target.is_mount() or Path.cwd().is_relative_to(target):
        problem = (
            "found a mount point, or the working directory or a folder around it, "
            "which cannot be replaced"
        )
        raise WeightsError(str(target), option, problem, hint)
    is_model = (target / "config.json").exists() or any(target.glob("model*.safetensors"))
    is_same_kind = is_model if mark is None else (target / mark).exists() and not is_model
    others = [item for item in target.iterdir() if not TOKENIZER_FILE.fullmatch(item.name)]
    if others and not is_same_kind:  # a tokenizer alone is often saved first
        names = ", ".join(sorted(os.listdir(target))[:5])
        problem = f"found a folder that is no checkpoint of this kind ({names}), expected none or an empty one"
        raise WeightsError(str(target), option, problem, hint)


def bring_back(target: Path) -> None:
    """Move the older folder back to `target` if a save moved it away and was killed before the new folder was there."""
    if os.path.lexists(target) or not _beside(target, "previous"):
        return
    time.sleep(BLINK_S)  # a running save is between its renames only briefly
    found = _beside(target, "previous")
    if found and not os.path.lexists(target):
        with suppress(OSError):  # another rank was faster
            os.rename(max(found, key=lambda path: path.stat().st_mtime), target)


def _beside(target: Path, kind: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.({kind})-[0-9a-f]{{8}}")
    try:
        return [path for path in sorted(target.parent.iterdir()) if pattern.fullmatch(path.name)]
    except OSError:
        return []


def _sweep(target: Path) -> None:
    """Clean up after killed saves: move the target's old folder back if needed, delete temporary folders."""
    bring_back(target)
    for path in _beside(target, "partial|previous"):
        if not _is_alive(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(path: Path) -> bool:
    """Return whether another process may be saving into `path`.

    Another process that saves holds a lock on `path`. On a file system without locks a folder younger than a day
    counts as in use.
    """
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(lock).st_mtime < LEFT_S
    finally:
        os.close(lock)
    return False


def _exchange(path: Path, target: Path) -> None:
    """Swap two folders: in one step by renameat2 where the system has it, else by three renames."""
    if _renameat2(path, target):
        return
    previous = _sibling(target, "previous")
    os.rename(target, previous)
    try:
        os.rename(path, target)
    except BaseException:
        os.rename(previous, target)
        raise
    os.rename(previous, path)


def _renameat2(path: Path, target: Path) -> bool:
    """Swap two folders by one system call, renameat2; return False if C library, kernel or file system lacks it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    done = function(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE)
    code = ctypes.get_errno()
    if done != 0 and code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code), str(target))
    return done == 0


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for path in (Path(root), *(Path(root, name) for name in files)):
            is_ours = str(path) == root or stat.S_ISREG(path.lstat().st_mode)  # a pipe would block
            if is_ours and os.access(path, os.R_OK):
                _sync(path)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk; ignore that a file system cannot flush folders."""
    fileno = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fileno)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(fileno)
