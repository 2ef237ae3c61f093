"""Counts of the collectives that this rank has begun, so that peers can tell which ranks have gone ahead.

All ranks of a group begin its collectives in one order. Heartbeats carry the counts: a waiting rank sees from them
that another rank has begun later collectives, and so will not take part in this one (for example because it alone
evaluates).
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
    """Return {name of a process group: [number of collectives that this rank has begun in it]}, updated in place."""
    return _OF_WORLD.setdefault(dist.group.WORLD, {})


def note_step() -> None:
    """Count the beginning of a training step like that of a collective, because all ranks begin it together."""
    if dist.is_initialized():
        of_world().setdefault(STEPS, [0])[0] += 1


def collective(run: Callable[..., Any], *args: Any, group: Any, **options: Any) -> Any:
    """Count and run a collective `run(*args, group=group, **options)`, e.g. `dist.all_reduce`. If a
    peer is lost, raises a RankError that says which rank and why.
    """
    if torch.compiler.is_compiling():
        return run(*args, group=group, **options)
    found = _OF_GROUP.get(group)
    if found is None:
        found = _OF_GROUP[group] = of_world().setdefault(group.group_name, [0])
    found[0] += 1
    return explained(run, *args, group=group, **options)


def explained(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run `run(*args, **options)`, which waits for peers; RankError says which peer is lost and why."""
    try:
        return run(*args, **options)
    except RuntimeError as error:
        for explain in EXPLAIN:
            explain(error)
        raise
