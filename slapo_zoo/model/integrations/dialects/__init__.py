"""Registry of the engines (torch, DeepSpeed, Megatron) that run a scheduled model; each engine has its own module."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slapo_zoo.errors import MeshError, ScheduleError

HOMES = {  # engine --> module that is imported on first use
    "torch": "slapo_zoo.model.integrations.dialects.torch",
    "deepspeed": "slapo_zoo.model.integrations.dialects.deepspeed",
    "megatron": "slapo_zoo.model.integrations.dialects.megatron",
}
DIALECTS: dict[str, dict[str, Any]] = {"runtime_engine": {}, "log_parser": {}}


def register_dialect(cls_type: str, target: str) -> Callable[[Any], Any]:
    """Return a decorator that registers a class or function for the engine `target`. `cls_type` is the class's purpose:
    "runtime_engine" puts a scheduled model into the engine, "log_parser" reads figures from the engine's logs.
    """

    def register(cls: Any) -> Any:
        DIALECTS.setdefault(cls_type, {})[target] = cls
        return cls

    return register


def get_dialect_cls(cls_type: str, target: str, allow_none: bool = False) -> Any:
    """Return the class or function that `register_dialect` has registered for an engine.

    Args:
        cls_type: "runtime_engine" (puts a model into the engine) or "log_parser" (reads the engine's logs).
        target: name of the engine, e.g. "deepspeed".
        allow_none: return None for an unknown engine, instead of raising ScheduleError.
    """
    if target in HOMES:
        importlib.import_module(HOMES[target])
    known = DIALECTS.get(cls_type)
    if known is None:
        problem = f"found {cls_type!r}, expected one of {sorted(DIALECTS)}"
        raise ScheduleError("get_dialect_cls", "cls_type", problem, "pass one of these")
    if target not in known and not allow_none:
        hint = f"pass one of {sorted((HOMES.keys() | known.keys()) - {target})}"
        problem = f"found no {cls_type} for this target"
        raise ScheduleError("get_dialect_cls", f"target={target!r}", problem, hint)
    return known.get(target)


def init_target_engine(sch: Any, target: str | None, **kwargs: Any) -> tuple[Any, Any]:
    """Put a scheduled model into an engine (DeepSpeed, Megatron, torch's DDP or FSDP2); return (engine, optimizer).
    The engine is a TargetEngine: its `update(batch)` runs an optimizer step with the optimizer.

    Args:
        sch: a model of AutoScheduledModel. With target="torch" also a Schedule, i.e. a module and the changes that
            shard it: then the module, in DDP or FSDP2 if chosen, is returned in place of an engine.
        target: "torch" (or None), "deepspeed" or "megatron".
        **kwargs: options of the engine: those of `torch_engine`, or of its counterpart; each takes `optimizer=`.
    """
    kind = kwargs.get("data_parallel")
    if hasattr(sch, "mesh") and sch.mesh.cp > 1 and (kind or target not in (None, "torch")):
        problem = f"not supported together with cp={sch.mesh.cp}"
        hint = 'use target="torch" without data_parallel=: dp_shard= and precision= compose with cp; or load with cp=1'
        what = f"data_parallel={kind!r}" if kind else f"target={target!r}"
        raise MeshError("init_target_engine", what, problem, hint)
    return get_dialect_cls("runtime_engine", target or "torch")(sch, **kwargs)


def check_target(where: str, target: str | None, options: Any) -> None:
    """Raise ScheduleError for an engine that is unknown or not installed, or for an unknown or missing engine option.

    Loaders call this function before they read anything.

    Args:
        where: name of the loader for the error.
        target: name of the engine; None means "torch".
        options: value of `target_options=`, a dict or None.
    """
    name = target or "torch"
    what, found = f"target={name!r}", DIALECTS["runtime_engine"]
    if name not in HOMES and name not in found:
        problem = f"found no such engine, expected one of {sorted(HOMES.keys() | found.keys())}"
        raise ScheduleError(where, what, problem, "choose one of them")
    if name in HOMES and importlib.util.find_spec(name) is None:
        hint = f"pip install slapo-zoo[{name}]"
        raise ScheduleError(where, what, f"the package {name} is not installed", hint)
    if not isinstance(options, Mapping | None):
        problem = f"found {type(options).__name__}, expected a dict"
        hint = 'pass a dict, e.g. {"optimizer": AdamW}'
        raise ScheduleError(where, "target_options", problem, hint)
    takes = inspect.signature(get_dialect_cls("runtime_engine", name)).parameters
    _check_options(where, name, dict(options or {}), list(takes.values())[1:])


def _check_options(where: str, name: str, options: dict[str, Any], takes: list[Any]) -> None:
    """Raise ScheduleError if `options` lack a required argument of the engine `name`, or hold an unknown one.

    `takes` are the parameters (of `inspect`) that the engine accepts; `where` names the loader.
    """
    named = [p for p in takes if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in named if p.default is p.empty and p.name not in options]
    if needed:
        problem = f"found {sorted(options)}, expected {needed[0]!r} too, which {name} needs"
        hint = f'pass target_options={{"{needed[0]}": ...}}, as init_target_engine takes it'
        raise ScheduleError(where, "target_options", problem, hint)
    unknown = sorted(options.keys() - {p.name for p in named})
    if unknown and len(named) == len(takes):
        problem = f"found {unknown[0]!r}, expected some of {[p.name for p in named]}"
        raise ScheduleError(where, "target_options", problem, f"leave {unknown[0]!r} out")


def in_target(model: Any, target: str | None, options: Mapping[str, Any] | None) -> Any:
    """Return `model` in the engine named `target`, as a TargetEngine; under torch without `options` the model itself.
    `options` are the value of `target_options=`.
    """
    if target in (None, "torch") and not options:
        return model
    return init_target_engine(model, target, **dict(options or {}))[0]
