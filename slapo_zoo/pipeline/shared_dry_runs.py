"""Cache of dry runs in a process, shared by ranks that are threads and by later models with the same class, config,
mesh sizes and directives."""

import json
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

from slapo_zoo.hf.configs import config_key
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.pipeline.dataflow import Call

KEPT = 64  # number of dry runs that are cached, the newest ones
OF_SHAPES = ("tokens", "parameters")  # mesh dims whose ranks may hold shards of different shapes
_calls: dict[Any, list[Call]] = {}
_turn = threading.Lock()


def shared_calls(
    program: Any, shapes: Any, run: Callable[[], tuple[list[Call], bool]]
) -> tuple[list[Call], bool]:
    """Return the result of `run`, or that of an earlier call with the same keys.

    Args:
        program: key of the model, from `program_of`; None always calls `run`.
        shapes: key of the batch: its shapes and dtypes.
        run: makes a dry run; returns (calls of units, whether they hold for the data of its batch only). A result that
            holds for its data only is not cached.
    """
    with _turn:  # ranks that are threads wait for the first
        if program is not None and (program, shapes) in _calls:
            return _calls[program, shapes], False
        calls, used_data = run()
        if program is not None and not used_data:
            _calls[program, shapes] = calls
            while len(_calls) > KEPT:
                del _calls[next(iter(_calls))]
        return calls, used_data


def program_of(
    schedule: Schedule, cls: Any, units: Sequence[str], leave_out: Collection[str]
) -> Any:
    """Return a key of all that determines a dry run except the batch; None if a directive holds a Python object.

    Args:
        schedule: schedule of any rank.
        cls: class of the model.
        units: paths of the modules whose calls are recorded.
        leave_out: names of primitives that are not replayed in the dry run.
    """
    steps = [step for step in schedule.history if step[1].name not in leave_out]
    if any(directive.local() for _, directive in steps):
        return None
    try:
        written = json.dumps([[pattern, type(d).name, d.arguments()] for pattern, d in steps])
    except TypeError:  # a user's directive may hold any object
        return None
    mesh, state = schedule.mesh, schedule.state
    sizes = [(dim.name, mesh.size(dim.name), mesh.coord(dim.name) if dim.divides in OF_SHAPES else 0)
             for dim in mesh.DIMS]  # fmt: skip
    return (
        cls, _source(cls), tuple(units), config_key(schedule.model.config), written, tuple(sizes),
        state.compute_dtype, str(state.positions),
    )  # fmt: skip


def _source(cls: Any) -> tuple[Any, ...]:
    """Return weak references to the functions, classes and forwards in the Python module of `cls`, as part of a key.

    The key then differs after a user has replaced one of them.
    """
    parts = [part for part in vars(sys.modules[cls.__module__]).values() if isinstance(part, FunctionType | type)]  # fmt: skip
    forwards = (getattr(part, "forward", None) for part in parts)
    return tuple(map(weakref.ref, [*parts, *(each for each in forwards if each is not None)]))
