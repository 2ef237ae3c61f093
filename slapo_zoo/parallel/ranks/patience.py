"""Waiting for steps in which one rank works alone, such as a download or the check of a published schedule.

Such steps communicate over a process group with a long timeout. A waiting rank logs for which ranks it waits,
raises at once an error that another rank has written to the store, and names a rank that has stopped.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from slapo_zoo.errors import RankError
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.ranks import heartbeat
from slapo_zoo.parallel.rng.seeds import get_logger

LIMIT_S = 3600.0  # for the slowest disk or download
SILENCE_S = 45.0  # a rank without a heartbeat for so long counts as stopped
PROGRESS_S = 30.0
LOOK_S = 1.0


class _Waiting:
    """Gloo group with a long timeout, and a count per step (by name) of how often this rank has waited in that step."""

    def __init__(self) -> None:
        self.group, self.steps = None, Counter[str]()


# Keyed weakly by process group, because the threads of a group that is kept alive go on polling.
_OF_WORLD: WeakKeyDictionary[Any, _Waiting] = WeakKeyDictionary()


def _waiting() -> _Waiting:
    return _OF_WORLD.setdefault(dist.group.WORLD, _Waiting())


_GROUP: ContextVar[Any] = ContextVar("group", default=None)  # None in a new thread


@contextmanager
def over_group(group: Any) -> Iterator[None]:
    """Context in which `gather_objects` uses `group`, a process group of all ranks, instead of `patient_group()`."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def patient_group() -> Any:
    """Return a gloo group of all ranks with a timeout of LIMIT_S (an hour), created once per default process group."""
    waiting = _waiting()
    if waiting.group is None:
        _meet("a first step together")
        waiting.group = compat.patient_group(LIMIT_S)
    return waiting.group


def _meet(what: str) -> None:
    """Wait until all ranks have reached the step named `what`, and log which ranks are late. Without this, the creation
    of a process group that follows would wait silently.
    """
    heart = heartbeat.current()
    if heart is None:
        return
    heart.arrive("group", 1)
    _watch(what, "group", 1, lambda: not heart.late("group", 1))


def gather_objects(what: str, mine: Any) -> list[Any]:
    """Gather one object per rank and return them by rank, however long the slowest rank takes.

    Args:
        what: name of the step for messages.
        mine: this rank's object; it must be picklable.

    Raises:
        RankError: another rank failed, has stopped, or is more than LIMIT_S (an hour) late.
        RuntimeError: gloo's error if the process of another rank ended.
    """
    own = _GROUP.get()
    place, group = ("main", patient_group()) if own is None else ("save", own)
    steps = _waiting().steps
    steps[place] += 1
    number = steps[place]
    if (heart := heartbeat.current()) is not None:
        heart.arrive(place, number)
    here = torch.ones(1, dtype=torch.int64, device="cpu")
    ready = [torch.zeros_like(here) for _ in range(dist.get_world_size())]
    work: Any = dist.all_gather(ready, here, group, async_op=True)
    _watch(what, place, number, work.is_completed)
    work.wait()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    return found


def meet(what: str, ranks: Sequence[int]) -> list[int]:
    """Wait until all of `ranks` have called this function; return the ranks that will not call it, usually none.

    A rank that has begun more collectives than this rank, but has not called this function, will not call it.

    Args:
        what: name of the step for messages.
        ranks: global ranks that should meet, this one included.

    Raises:
        RankError: another rank failed, or is late by more than the timeout of collectives.
    """
    heart = heartbeat.current()
    if heart is None:
        return []
    place, steps = f"{what}/{ranks[0]}/{len(ranks)}", _waiting().steps
    steps[place] += 1
    heart.begun.note_line()
    heart.come(place)
    begin = looked = time.monotonic()
    pause, others = 2e-5, [rank for rank in ranks if rank != heart.rank]
    while heart.came(place) < steps[place] * len(ranks):
        time.sleep(pause)
        pause, now = min(2 * pause, 0.02), time.monotonic()
        if now - looked < LOOK_S / 2:
            continue
        looked, gone = now, heart.past(others)
        if gone and heart.came(place) < steps[place] * len(ranks):
            return gone
        if heart.error:
            raise heartbeat.parse_error(heart.error)
        if now - begin > compat.timeout_of_world():
            raise _too_late(what, [], now - begin, heart.lines())
    return []


def _watch(what: str, place: str, number: int, is_done: Callable[[], bool]) -> None:
    """Wait until `is_done()`, and log the ranks that are late. Raises RankError if another rank failed or is silent.

    Args:
        what: name of the step for messages.
        place: key of the step in the store; ranks count how often they reach it.
        number: how often this rank has reached it; a rank with a lower count is late.
        is_done: True when the wait is over.
    """
    begin = time.monotonic()
    pause, looked, told = 2e-5, begin, begin
    while not is_done():
        time.sleep(pause)
        pause, now = min(2 * pause, 0.02), time.monotonic()
        if now - looked < LOOK_S:
            continue
        looked = now
        late = _check_peers(what, place, number, now - begin)
        if now - told >= PROGRESS_S:
            told = now
            _say(what, late, now - begin)


def _check_peers(what: str, place: str, number: int, seconds: float) -> list[int]:
    """Return the ranks that have not reached the step `what` for the `number`-th time. RankError if a rank failed, a
    late one had no heartbeat for 45 s, or `seconds`, the wait, is over an hour. `place` is its key in the store.
    """
    heart = heartbeat.current()
    if heart is None:
        if seconds > LIMIT_S:
            raise _too_late(what, [], seconds)
        return []
    if heart.error:
        raise heartbeat.parse_error(heart.error)
    late, quiet = heart.late(place, number), heart.silence()
    if silent := [rank for rank in late if quiet[rank] > SILENCE_S]:
        problem = f"no heartbeat arrived for {max(quiet[rank] for rank in silent):.0f} s"
        hint = "check whether its process was stopped and whether its machine can be reached"
        raise RankError(heartbeat.names_of(silent), what, problem, hint)
    if seconds > LIMIT_S:
        raise _too_late(what, late, seconds)
    return late


def _too_late(what: str, late: list[int], seconds: float, lines: str = "") -> RankError:
    who = heartbeat.names_of(late) if late else "another rank"
    problem = f"timed out after {seconds:.0f} s waiting for {who} at {what}"
    problem += f" ({lines})" if lines else ""
    hint = f"see the output of {'that rank' if late else 'the other ranks'}"
    hint += "; SLAPO_ZOO_TIMEOUT_S or timeout_s= allow more time" if seconds <= LIMIT_S else ""
    return RankError(f"rank {dist.get_rank()}", what, problem, hint)


def _say(what: str, late: list[int], seconds: float) -> None:
    """Log that step `what` has waited `seconds` for the ranks `late`; of the waiting ranks only the lowest logs."""
    waiting = [rank for rank in range(dist.get_world_size()) if rank not in late]
    if late and waiting[:1] == [dist.get_rank()]:
        who = heartbeat.names_of(late)
        get_logger("slapo_zoo").info("waiting for %s at %s: %.0f s", who, what, seconds)
