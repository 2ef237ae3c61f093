"""Patterns to look for in a graph: functions, Pattern classes, and modules by name."""

import enum
import re
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from slapo_zoo.errors import ScheduleError


class Wildcard(enum.Enum):
    """A constant in a pattern that may have any value."""

    ANY = "any"


ANY = Wildcard.ANY


class Pattern(nn.Module):
    """A pattern as a module: its `forward` is looked for.

    Submodules match calls of modules of the same type, whatever their sizes; the arguments of
    `forward` match any value. The literals in `forward` must be equal, `ANY` excepted.
    """

    def forward(self, *args: Any) -> Any:
        """Defines what is looked for; a subclass writes it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


class ModulePattern(nn.Module):
    """Part of a Pattern: the call of a module whose path, or the end of it, matches a regex."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, *args: Any) -> Any:
        """Raise ScheduleError: a pattern's call is matched, never run."""
        raise ScheduleError("pattern", f"ModulePattern({self.name!r})", "it runs in no model")


def call_module(regex: str, *args: Any) -> Any:
    """Write the call of a module into a pattern function; its path, or the end of it, matches the regex."""
    proxies = [a for a in args if isinstance(a, fx.Proxy)]
    if not proxies:
        problem = "it stands for a call inside a pattern, and needs an argument of the pattern"
        hint = 'lambda x: call_module("fc.*", x)'
        raise ScheduleError("pattern", f"call_module({regex!r})", problem, hint)
    return proxies[0].tracer.create_proxy("call_function", call_module, (regex, *args), {})


def name_matches(regex: str, target: str) -> bool:
    """Return whether a regex is the whole path of a module, or the whole of its last segments.

    >>> name_matches("query|key", "attention.self.key"), name_matches("dense", "dense_out")
    (True, False)
    """
    parts = target.split(".")
    return any(re.fullmatch(regex, ".".join(parts[i:])) for i in range(len(parts)))


class _PatternTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_pattern(pattern: Callable[..., Any]) -> fx.GraphModule:
    """The graph of a pattern: a function, a lambda, or a Pattern."""
    name = getattr(pattern, "__name__", type(pattern).__name__)
    tracer = _PatternTracer()
    try:
        graph = tracer.trace(pattern)
    except ScheduleError:
        raise
    except Exception as error:
        hint = "write it with tensor operations only; sizes and `if` have no place in it"
        raise ScheduleError("pattern", name, f"{type(error).__name__}: {error}", hint) from error
    root = pattern if isinstance(pattern, nn.Module) else tracer.root
    unused = [n.name for n in graph.nodes if n.op == "placeholder" and not n.users]
    if unused or not any(n.op.startswith("call") for n in graph.nodes):
        problem = f"arguments {unused} take no part" if unused else "it does nothing"
        raise ScheduleError("pattern", name, problem, "return what shall be found")
    return fx.GraphModule(root, graph)
