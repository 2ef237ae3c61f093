"""Resolve the argument `subgraph` of a change to a traced module (`fuse`, ...) to the graph nodes that it names."""

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from slapo_zoo.language.directive import Directive, Site
from slapo_zoo.language.graph.find import find, find_nodes
from slapo_zoo.language.graph.match import Matches, Subgraph
from slapo_zoo.language.graph.pattern import Pattern


def resolve(site: Site, directive: Directive, spec: Any) -> list[Subgraph]:
    """Return the subgraphs of a traced module that `spec` names, or raise ScheduleError if there are none.

    Args:
        site: the traced module, with its path.
        directive: the change whose argument `subgraph` is `spec`, for errors.
        spec: a regex (each called module of that name is a subgraph), a pattern (function or Pattern), a predicate of
            a node, a subgraph or list of subgraphs from `find`, or a list of (path, node), which is one subgraph.
    """
    if not any(isinstance(m, fx.GraphModule) for m in site.module.modules()):
        hint = "call trace() or find() on this module first"
        raise directive.fail(site, "the module has no graph", hint)
    found = _subgraphs(site, spec)
    if not found:
        problem = f"nothing in the graph matches {spec!r}{_rejections(found)}"
        hint = "see the nodes by print(sch[path].mod.graph); trace with flatten=True has those of submodules too"
        raise directive.fail(site, problem, hint)
    for subgraph in found:
        _check_alive(site, directive, subgraph)
    return found


def one_subgraph(nodes: Sequence[tuple[str, fx.Node]]) -> Subgraph:
    """Return the Subgraph of (path, node) pairs of one graph; nodes whose values are used outside are its outputs."""
    path, first = nodes[0]
    module: Any = first.graph.owning_module
    inside = {node for _, node in nodes}
    ordered = tuple(n for n in first.graph.nodes if n in inside)
    inputs = dict.fromkeys(i for n in ordered for i in n.all_input_nodes if i not in inside)
    outputs = tuple(n for n in ordered if any(u not in inside for u in n.users))
    return Subgraph(path, module, ordered, {i.name: i for i in inputs}, outputs)


def _subgraphs(site: Site, spec: Any) -> list[Subgraph]:
    if isinstance(spec, str):
        return [one_subgraph([pair]) for pair in find_nodes(site.module, site.path, spec)]
    if isinstance(spec, Subgraph):
        return [spec]
    if isinstance(spec, Pattern) or callable(spec):
        found = find(site.module, site.path, spec)
        return found if isinstance(found, Matches) else [one_subgraph([pair]) for pair in found]
    if is_node(spec):
        return [one_subgraph([spec])]
    if isinstance(spec, (list, tuple)) and spec and all(map(is_node, spec)):
        return [one_subgraph(list(spec))]
    parts = spec if isinstance(spec, (list, tuple)) else ()
    return [s for part in parts for s in _subgraphs(site, part)]


def is_node(spec: Any) -> bool:
    """Return whether `spec` is one (path, node) pair as `find` returns."""
    return isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], fx.Node)


def _rejections(found: list[Subgraph]) -> str:
    reasons = [reason for _, reason in found.rejected] if isinstance(found, Matches) else []
    return f" ({'; '.join(reasons)})" if reasons else ""


def _check_alive(site: Site, directive: Directive, subgraph: Subgraph) -> None:
    current: nn.Module | None = site.state.modules.get(subgraph.path)
    graph = current.graph if isinstance(current, fx.GraphModule) else None
    alive = set(graph.nodes) if graph is not None else set()
    gone = [n.name for n in subgraph.nodes if n not in alive]
    if gone:
        problem = f"{gone} are not in the graph of {subgraph.path!r} any more"
        raise directive.fail(site, problem, "call find() again: a directive has replaced the nodes")
    inside = not site.path or subgraph.path == site.path
    if not (inside or subgraph.path.startswith(site.path + ".")):
        problem = f"the subgraph was found in {subgraph.path!r}, which is not below this module"
        raise directive.fail(site, problem, f"use sch[{subgraph.path!r}]")
