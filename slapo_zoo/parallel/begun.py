"""Count the collectives that this rank begins: who has begun more of them than we is past the place where we wait.

All ranks of a group begin its collectives in one order. A rank that waits at a place to which another never
comes (one rank alone reads logits, or steps) tells so by the counts, which heartbeats carry.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

STEPS = "train_step"
EXPLAIN: list[Callable[[Exception], None]] = []  # raises in words what gloo says of a lost peer

# By process group, and no longer than it lives; ranks may be threads, each with groups of its own.
_OF_WORLD: WeakKeyDictionary[Any, dict[str, list[int]]] = WeakKeyDictionary()
_OF_GROUP: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


def of_world() -> dict[str, list[int]]:
    """Return counts of this rank: what is counted --> [how often]."""
    return _OF_WORLD.setdefault(dist.group.WORLD, {})


def now() -> dict[str, int]:
    """The counts of this rank."""
    return {name: count for name, (count,) in list(of_world().items())}


def note_step() -> None:
    """All ranks begin a step together."""
    if dist.is_initialized():
        of_world().setdefault(STEPS, [0])[0] += 1


def collective(run: Callable[..., Any], *args: Any, group: Any, **options: Any) -> Any:
    """Begin a collective of torch; a peer that is lost in it is told in words."""
    if torch.compiler.is_compiling():
        return run(*args, group=group, **options)
    found = _OF_GROUP.get(group)
    if found is None:
        found = _OF_GROUP[group] = of_world().setdefault(group.group_name, [0])
    found[0] += 1
    return explained(run, *args, group=group, **options)


def explained(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run what waits for peers; the error of one that is lost is told in words."""
    try:
        return run(*args, **options)
    except RuntimeError as error:
        for explain in EXPLAIN:
            explain(error)
        raise
