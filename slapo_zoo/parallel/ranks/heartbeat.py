"""Heartbeats: they tell which ranks are alive, how far each is, and the first error that a rank published.

Once a second, a thread of every rank writes the next number to the process group's store, and checks whether a rank
published an error. So a stopped rank can be named, and an error is known even after the store's process ended.
"""

import atexit
import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist

from slapo_zoo.errors import RankError
from slapo_zoo.parallel.begun import Begun, of_world

BEAT_S = 1.0
STILL = 3  # beats without a new collective, after which a rank publishes the line that began its last one
LEAVE_S = 2.0  # seconds to wait for the thread, which may hang in a store that does not answer
ERROR_KEY = "slapo_zoo/first_error"
ENDED = "ended"


class Heart:
    """Thread, started at once, that tells the other ranks each second, through the store, that this rank is alive.

    Args:
        store: key-value store of the process group.
        rank: this rank.
        size: number of ranks.
        begun: counts, per process group, of the collectives that this rank has begun; and the user's line of the last.

    Attributes:
        error: JSON of the first error that a rank has published, or "".
    """

    def __init__(self, store: Any, rank: int, size: int, begun: Begun):
        self.store, self.rank, self.size, self.begun = store, rank, size, begun
        self.error = ""
        self._stopped = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()
        _ALIVE.add(self)

    def _work(self) -> None:
        count, moved, told, line = 0, 0, {}, None
        with suppress(RuntimeError):  # the process that held the store has ended
            while True:
                self.store.set(_key("beat", self.rank), str(count := count + 1))
                if (counts := self._counts()) != told:
                    self.store.set(_key("begun", self.rank), json.dumps(told := counts))
                    self.store.set(_key("line", self.rank), "")
                    moved, line = count, None
                elif count >= moved + STILL and self.begun.line and self.begun.line != line:
                    file, number = line = self.begun.line
                    self.store.set(_key("line", self.rank), f"{Path(file).name}:{number}")
                if not self.error and self.store.check([ERROR_KEY]):
                    self.error = self.store.get(ERROR_KEY).decode()
                    self.store.set(_key("told", self.rank), "1")
                if self._stopped.wait(BEAT_S):
                    break
            self.store.set(_key("beat", self.rank), ENDED)

    def leave(self) -> None:
        """Ask the heartbeat thread to end; the thread then tells the other ranks that this rank ended without an error."""
        self._stopped.set()

    def stop(self) -> None:
        """Tell the other ranks that this rank ends, and wait for the end of the thread, at most LEAVE_S seconds."""
        self.leave()
        self._thread.join(LEAVE_S)

    def arrive(self, place: str, number: int) -> None:
        """Publish that this rank has reached the step named `place` for the `number`-th time."""
        with suppress(RuntimeError):
            self.store.set(_key(f"at/{place}", self.rank), str(number))

    def late(self, place: str, number: int) -> list[int]:
        """Return the ranks that have not reached the step named `place` for the `number`-th time yet."""
        return [r for r in range(self.size) if int(self._get(_key(f"at/{place}", r), "0")) < number]  # fmt: skip

    def come(self, place: str) -> None:
        """Add 1 to the counter, shared by all ranks, of the ranks that have reached the point named `place`."""
        self.store.add(f"slapo_zoo/met/{place}", 1)

    def came(self, place: str) -> int:
        """Return how often all ranks together have reached the point named `place`, as counted by `come`."""
        return self.store.add(f"slapo_zoo/met/{place}", 0)

    def past(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have reported more collectives than this rank has begun, in a group of both."""
        mine = self._counts()
        theirs = ((rank, json.loads(self._get(_key("begun", rank), "{}"))) for rank in ranks)
        return [rank for rank, found in theirs if any(found.get(name, 0) > n for name, n in mine.items())]  # fmt: skip

    def silence(self) -> dict[int, float]:
        """Return {rank: seconds for which calls of this method have found the same heartbeat}; 0 at the first call."""
        now = time.monotonic()
        for rank in range(self.size):
            value = self._get(_key("beat", rank), "")
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, now)
        return {rank: now - when for rank, (_, when) in self._seen.items()}

    def lines(self) -> str:
        """Return "last collective of rank N at FILE:LINE, of rank M at ..." of ranks that began none for 3 s, or ""."""
        found = ((rank, self._get(_key("line", rank), "")) for rank in range(self.size))
        told = ", ".join(f"of rank {rank} at {line}" for rank, line in found if line)
        return told and f"last collective {told}"

    def not_told(self) -> list[int]:
        """Return the ranks that are alive and have not yet read the first error that a rank wrote to the store."""
        waiting = [r for r in range(self.size) if not self._get(_key("told", r), "")]
        return [r for r in waiting if self._get(_key("beat", r), "") not in ("", ENDED)]

    def _counts(self) -> dict[str, int]:
        return {name: n for name, (n,) in list(self.begun.counts.items())}

    def _get(self, key: str, default: str) -> str:
        with suppress(RuntimeError):
            if self.store.check([key]):
                return self.store.get(key).decode()
        return default


_ALIVE: WeakSet[Heart] = WeakSet()


@atexit.register  # registered at import, so that it runs after the exit functions that leave process groups
def _stop_all() -> None:
    """End all heartbeat threads at exit, even if the process group is already destroyed. A thread that is still in the
    C++ code of the store when the interpreter ends would abort the process.
    """
    hearts = list(_ALIVE)
    for heart in hearts:
        heart.leave()
    for heart in hearts:
        heart.stop()


def _key(kind: str, rank: int) -> str:
    """Return the key under which the store keeps the messages of one `kind`, such as "beat", from `rank`."""
    return f"slapo_zoo/{kind}/{rank}"


def parse_error(text: str | bytes) -> RankError:
    """Return the RankError that a rank has published as the JSON list [where, what, problem, hint, traceback]."""
    *parts, traceback_text = json.loads(text)
    error = RankError(*parts)
    error.traceback_text = traceback_text
    return error


# Keyed weakly by process group: ranks may be threads, and a reference kept here would let a forked process
# free a group of its parent, whose threads it lacks.
_OF_WORLD: WeakKeyDictionary[Any, Heart | None] = WeakKeyDictionary()


def current() -> Heart | None:
    """Return the heartbeat of this rank in the current process group, started on the first call. The result is None
    without a process group, with one rank, or if the store cannot be cloned.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if world not in _OF_WORLD:
        _OF_WORLD[world] = _start(world)
    return _OF_WORLD[world]


def _start(world: Any) -> Heart | None:
    from torch.distributed.distributed_c10d import _get_default_store

    with suppress(RuntimeError, AttributeError, NotImplementedError):
        store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        heart = Heart(store, dist.get_rank(), dist.get_world_size(), of_world())
        finalize(world, heart.leave)
        return heart
    return None


def stop() -> None:
    """Stop the heartbeat of the current process group, if there is one."""
    heart = _OF_WORLD.pop(dist.group.WORLD, None) if dist.is_initialized() else None
    if heart is not None:
        heart.stop()


def silent_ranks(seconds: float) -> list[int]:
    """Watch the other ranks for at most `seconds`; return the ranks that sent no heartbeat in that time."""
    heart = current()
    if heart is None:
        return []
    heart.silence()
    deadline = time.monotonic() + seconds
    silent = [rank for rank in range(heart.size) if rank != heart.rank]
    while silent and time.monotonic() < deadline:
        time.sleep(min(BEAT_S / 4, seconds / 8))
        quiet = heart.silence()
        silent = [r for r in silent if quiet[r] >= seconds - (deadline - time.monotonic()) - BEAT_S]
    return silent


def names_of(ranks: Iterable[int]) -> str:
    """Format ranks as "rank 1" or "ranks 1, 3"."""
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
