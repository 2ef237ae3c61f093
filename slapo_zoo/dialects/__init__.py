"""Engines that run a scheduled model; one file and one line here per engine."""

import importlib
from collections.abc import Callable
from typing import Any

from slapo_zoo.errors import ScheduleError

Engine = Callable[..., Any]
HOMES = {  # an engine is imported when it is asked for
    "torch": "slapo_zoo.dialects.torch",
    "deepspeed": "slapo_zoo.dialects.deepspeed",
    "megatron": "slapo_zoo.dialects.megatron",
}
DIALECTS: dict[str, dict[str, Any]] = {"runtime_engine": {}, "log_parser": {}}


def register_dialect(cls_type: str, target: str) -> Callable[[Any], Any]:
    """Register a class or function as the `cls_type` of a framework."""

    def register(cls: Any) -> Any:
        DIALECTS.setdefault(cls_type, {})[target] = cls
        return cls

    return register


def get_dialect_cls(cls_type: str, target: str, allow_none: bool = False) -> Any:
    """The class of a framework for one job ("runtime_engine", "log_parser").

    Args:
        cls_type: the job.
        target: the framework.
        allow_none: return None for an unknown framework instead of an error.
    """
    if target in HOMES:
        importlib.import_module(HOMES[target])
    known = DIALECTS.get(cls_type)
    if known is None:
        problem = f"found {cls_type!r}, expected one of {sorted(DIALECTS)}"
        raise ScheduleError("dialects", "cls_type", problem, "name such a job")
    if target not in known and not allow_none:
        hint = f"known: {sorted(HOMES.keys() | known.keys())}"
        raise ScheduleError("dialects", f"target={target!r}", f"no {cls_type} for it", hint)
    return known.get(target)


def init_target_engine(sch: Any, target: str | None, **kwargs: Any) -> tuple[Any, Any]:
    """The engine of a framework around a scheduled model: (engine, optimizer).

    Args:
        sch: a schedule, or a model of AutoScheduledModel.
        target: the framework; None means "torch".
        **kwargs: for the engine.
    """
    return get_dialect_cls("runtime_engine", target or "torch")(sch, **kwargs)
