"""Find the model of a parameter: torch's hooks around an optimizer step get parameters only."""

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.parallel.rank_plan import RankPlan

_KNOWN: Any = WeakIdKeyDictionary()  # parameter --> (weak reference to its model's runtime, name)


def note(runtime: Any, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Register the parameters `named` of a scheduled model, so that its runtime state and plan can
    be found from each. `runtime` is the model's runtime state.
    """
    mine = ref(runtime)
    for name, p in named:
        if p not in _KNOWN or _KNOWN[p][1] != name:  # an adapter has renamed it
            _KNOWN[p] = mine, name


def runtime_of(p: Any) -> Any:
    """Return the runtime state (schedule, plan, engine) of a parameter's scheduled model, or None."""
    return _KNOWN[p][0]() if p in _KNOWN else None


def place_of(p: Any) -> tuple[RankPlan, str] | None:
    """Return (plan of the parameter's model, name of the parameter in it), or None for a parameter of no model."""
    runtime = runtime_of(p)
    return None if runtime is None else (runtime.plan, _KNOWN[p][1])


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
