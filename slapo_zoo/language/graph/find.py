"""Search traced graphs: modules by name, nodes by a predicate, subgraphs by a pattern."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph.match import Matcher, Matches
from slapo_zoo.language.graph.pattern import Pattern, name_matches, trace_pattern
from slapo_zoo.language.graph.traced import under

Found = tuple[str, fx.Node]


def find(module: nn.Module, path: str, what: Any) -> list[Found] | Matches:
    """Search the graph of a module and all graphs below it.

    Args:
        module: a traced module.
        path: path of the module.
        what: a regex for the path of a called module (the whole path, or its last segments), a predicate whose
            only argument is named `node`, or a pattern: a function or Pattern that computes the operations to find.

    Returns:
        List of (path of the traced module, node); for a pattern, the Matches (a list of subgraphs) of all graphs.
    """
    if isinstance(what, str) or is_predicate(what):
        return find_nodes(module, path, what)
    if isinstance(what, type) and issubclass(what, Pattern):
        what = what()
    if not callable(what):
        hint = "pass a regex, a predicate `lambda node: ...`, a function, or a Pattern"
        raise ScheduleError(path or "(the model)", "find", f"cannot search for {what!r}", hint)
    pattern = trace_pattern(what)
    found = Matches()
    for at, graph in _graphs(module, path):
        matches = Matcher(pattern, graph, at).search()
        found += matches
        found.overlapping += matches.overlapping
        found.rejected += matches.rejected
    return found


def find_nodes(module: nn.Module, path: str, what: str | Callable[..., bool]) -> list[Found]:
    """Return the nodes of a module's graphs that match, as pairs (path of the traced module, node).

    Args:
        module: module whose own graph and those below it are searched.
        path: path of the module.
        what: regex for the paths of called modules, or predicate of a node.
    """

    def wanted(node: fx.Node) -> bool:
        if isinstance(what, str):
            return node.op == "call_module" and name_matches(what, str(node.target))
        return bool(what(node))

    graphs = _graphs(module, path)
    return [(at, node) for at, graph in graphs for node in graph.graph.nodes if wanted(node)]


def is_predicate(what: Any) -> bool:
    """Return whether `what` is a function whose only argument is named `node`, and so a test of a single node."""
    if not inspect.isfunction(what):
        return False
    return list(inspect.signature(what).parameters) == ["node"]


def _graphs(module: nn.Module, path: str) -> Iterator[tuple[str, fx.GraphModule]]:
    for below, m in module.named_modules():
        if isinstance(m, fx.GraphModule):
            yield under(path, below), m
