"""Lookup of the scheduled model of a parameter, for hooks around an optimizer step, which get parameters only."""

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.parallel.rank_plan import RankPlan

_KNOWN: Any = WeakIdKeyDictionary()  # parameter --> (weak reference to its model's runtime, name)


def note(runtime: Any, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Register the (name, parameter) pairs `named` of a scheduled model, whose state (schedule, plan, engine) is
    `runtime`, so that `runtime_of` and `place_of` find the model from a parameter.
    """
    mine = ref(runtime)
    for name, p in named:
        if p not in _KNOWN or _KNOWN[p][1] != name:  # an adapter has renamed it
            _KNOWN[p] = mine, name


def runtime_of(p: Any) -> Any:
    """Return the runtime state (schedule, plan, engine) of the scheduled model that has the parameter `p`, or None."""
    return _KNOWN[p][0]() if p in _KNOWN else None


def place_of(p: Any) -> tuple[RankPlan, str] | None:
    """Return (plan of the scheduled model that has the parameter `p`, name of `p`), or None if no scheduled model has
    it. The plan has the sharding and the gradient sums of each tensor of the model.
    """
    runtime = runtime_of(p)
    return None if runtime is None else (runtime.plan, _KNOWN[p][1])


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return a list of the parameters in all parameter groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
