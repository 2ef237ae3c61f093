"""Patterns to search for in a graph: functions, Pattern classes, and module calls by name."""

import enum
import re
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from slapo_zoo.errors import ScheduleError


class Wildcard(enum.Enum):
    """Enum with one member, `ANY`: a constant in a pattern that matches any value."""

    ANY = "any"


ANY = Wildcard.ANY


class Pattern(nn.Module):
    """Base class of patterns written as modules; the operations of its `forward` are searched for.

    Submodules match calls of modules of the same class, whatever their sizes; arguments of `forward` match any
    value; literals in `forward` must be equal, except `ANY`.
    """

    def forward(self, *args: Any) -> Any:
        """Compute the operations to find in a graph; each subclass overrides this method."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(): what to find")


class ModulePattern(nn.Module):
    """Submodule of a Pattern: matches the call of a module whose path, or its end, matches the regex `name`."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, *args: Any) -> Any:
        """Raise ScheduleError: this call is only traced and matched, never run."""
        problem = "a pattern is matched in a graph, and cannot be called"
        hint = "pass the pattern to sch[path].find()"
        raise ScheduleError("pattern", f"ModulePattern({self.name!r})", problem, hint)


def call_module(regex: str, *args: Any) -> Any:
    """Return, for a pattern function, the proxy of a call with `args` of any module whose path, or the end of it,
    matches `regex`. Raise ScheduleError if none of `args` is a proxy, i.e. outside of a pattern.
    """
    proxies = [a for a in args if isinstance(a, fx.Proxy)]
    if not proxies:
        problem = "call_module was called outside of a pattern, or without its arguments"
        hint = 'write a pattern such as lambda x: call_module("fc.*", x)'
        raise ScheduleError("pattern", f"call_module({regex!r})", problem, hint)
    return proxies[0].tracer.create_proxy("call_function", call_module, (regex, *args), {})


def name_matches(regex: str, target: str) -> bool:
    """Return whether a regex matches the dotted path `target`, or its last segment, its last two segments, and so on.

    >>> name_matches("query|key", "attention.self.key"), name_matches("dense", "dense_out")
    (True, False)
    """
    parts = target.split(".")
    try:
        re.compile(regex)
    except re.error as error:
        hint = "write a path as it is, and escape special characters: r'\\[' matches a bracket"
        raise ScheduleError("find", regex, f"is no regular expression: {error}", hint) from None
    return any(re.fullmatch(regex, ".".join(parts[i:])) for i in range(len(parts)))


class _PatternTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_pattern(pattern: Callable[..., Any]) -> fx.GraphModule:
    """Trace a pattern (a function or a Pattern) with plain `torch.fx`; raise ScheduleError when that fails."""
    name = getattr(pattern, "__name__", type(pattern).__name__)
    tracer = _PatternTracer()
    try:
        graph = tracer.trace(pattern)
    except ScheduleError:
        raise
    except Exception as error:
        hint = "write the pattern with tensor operations only, without sizes and `if`"
        raise ScheduleError("pattern", name, f"{type(error).__name__}: {error}", hint) from error
    root = pattern if isinstance(pattern, nn.Module) else tracer.root
    unused = [n.name for n in graph.nodes if n.op == "placeholder" and not n.users]
    if unused or not any(n.op.startswith("call") for n in graph.nodes):
        problem = f"arguments {unused} are not used" if unused else "the pattern computes nothing"
        hint = "use every argument, and return the result of the operations to find"
        raise ScheduleError("pattern", name, problem, hint)
    return fx.GraphModule(root, graph)
