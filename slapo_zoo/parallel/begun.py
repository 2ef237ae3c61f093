"""Counts of the collectives that this rank has begun, and the line of the user's program that began the last one.

All ranks of a group begin its collectives in the same order. The heartbeats that ranks send carry the counts, so a
waiting rank sees that another rank has begun later collectives and will not take part in this one (for example because
it alone evaluates). Each collective stores its line, as the heartbeat thread may not read frames of other threads.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

STEPS = "train_step"
EXPLAIN: list[Callable[[Exception], None]] = []  # raise a RankError for a lost peer

_NOT_OF_USER = (str(Path(__file__).parents[1]), str(Path(threading.__file__).parent), "<")


@dataclass
class Begun:
    """Collectives that this rank has begun in the groups of one world (default process group).

    Attributes:
        counts: name of a process group (or "train_step") --> list of one int, the collectives (or steps) begun.
        line: (file, line number) in the user's program of the last collective or wait for peers; None before the first.
    """

    counts: dict[str, list[int]] = field(default_factory=dict)
    line: tuple[str, int] | None = None

    def add(self, count: list[int]) -> None:
        """Count one more begun collective in `count`, one of the lists in `counts`; store the user's line that begins it."""
        count[0] += 1
        self.note_line()

    def note_line(self) -> None:
        """Store the innermost running line of the user's program in the attribute `line`."""
        frame = sys._getframe(1)
        while frame is not None:
            if _is_of_user(frame.f_code.co_filename):
                self.line = frame.f_code.co_filename, frame.f_lineno
                break
            frame = frame.f_back


@lru_cache(4096)
def _is_of_user(file: str) -> bool:
    """Return whether `file` belongs to neither this package, the standard library nor an installed package, which lies
    beside its `.dist-info` in a folder of sys.path.
    """
    folders = [path for path in sys.path if path and file.startswith(f"{path}/")]
    return not (
        file.startswith(_NOT_OF_USER) or any(any(Path(f).glob("*.dist-info")) for f in folders)
    )


# Keyed weakly by process group; ranks may be threads, each with groups of its own.
_OF_WORLD: WeakKeyDictionary[Any, Begun] = WeakKeyDictionary()
_OF_GROUP: WeakKeyDictionary[Any, tuple[Begun, list[int]]] = WeakKeyDictionary()


def of_world() -> Begun:
    """Return this rank's `Begun` (counts of collectives), a new one for each default process group that it joins."""
    return _OF_WORLD.setdefault(dist.group.WORLD, Begun())


def note_step() -> None:
    """Count one more training step as begun, like a collective, so that heartbeats show which rank is ahead."""
    if dist.is_initialized():
        begun = of_world()
        begun.add(begun.counts.setdefault(STEPS, [0]))


def collective(run: Callable[..., Any], *args: Any, group: Any, **options: Any) -> Any:
    """Count the collective `run(*args, group=group, **options)`, e.g. `dist.all_reduce`, as begun, run it and return its
    result. If a peer is lost (its process ended or does not answer), raise a RankError that says which rank and why.
    """
    if torch.compiler.is_compiling():
        return run(*args, group=group, **options)
    found = _OF_GROUP.get(group)
    if found is None:
        begun = of_world()
        found = _OF_GROUP[group] = begun, begun.counts.setdefault(group.group_name, [0])
    found[0].add(found[1])
    return explained(run, *args, group=group, **options)


def explained(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return `run(*args, **options)`, a call that waits for peers; if one is lost, a RankError says which and why."""
    try:
        return run(*args, **options)
    except RuntimeError as error:
        for explain in EXPLAIN:
            explain(error)
        raise
