"""Merge a trace in training mode and a trace in eval mode into one graph that is right in both.

A forward reads `self.training` as a Python bool, so a trace fixes it: a dropout traced in training mode would
keep dropping in `eval()`. Literals that differ between the traces become nodes that read the mode.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from slapo_zoo.language.graph import guards

LITERALS = (bool, int, float, str, type(None))


def merge(graph: Graph, training: bool, other: Graph | None, where: str) -> bool:
    """Make `graph` compute what the module computes in training and in eval mode, using a trace in the other mode.

    Args:
        graph: graph that was traced in the mode `training`; it is changed in place.
        training: True when `graph` was traced in training mode.
        other: trace in the other mode; None when that trace failed.
        where: path of the traced module, for the error that a run in the other mode raises.

    Returns:
        True when the graph is right in both modes; otherwise the graph now raises when run in the other mode.
    """
    if other is None or not _differ_in_literals_only(graph, other):
        nodes = _training(graph)
        with graph.inserting_after(nodes):
            said = "self.training"
            graph.call_function(guards.expect, (nodes, training, where or "(the model)", said))
        return False
    same = dict(zip(other.nodes, graph.nodes, strict=True))
    asked: Node | None = None
    for theirs, node in list(same.items()):
        mine, spec = tree_flatten((node.args, node.kwargs))
        pairs = list(zip(mine, _leaves(theirs, same)[0], strict=True))
        if all(_equal(a, b) for a, b in pairs):
            continue
        asked = asked or _training(graph)
        with graph.inserting_before(node):
            mixed = [a if _equal(a, b) else _by_mode(graph, asked, a, b, training) for a, b in pairs]  # fmt: skip
        node.args, node.kwargs = tree_unflatten(mixed, spec)
    return True


def _training(graph: Graph) -> Node:
    """Insert a node that reads `self.training` at the start of the graph, and return it."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before():
        module = graph.create_node("get_attr", "itself")
    with graph.inserting_after(module):
        return graph.call_function(getattr, (module, "training"))


def _differ_in_literals_only(a: Graph, b: Graph) -> bool:
    """Return whether the nodes of `a` and `b` call the same targets, with arguments that differ in literals only."""
    if len(a.nodes) != len(b.nodes):
        return False
    same = dict(zip(b.nodes, a.nodes, strict=True))
    for theirs, node in same.items():
        mine, spec = tree_flatten((node.args, node.kwargs))
        others, other_spec = _leaves(theirs, same)
        if (node.op, node.target, spec) != (theirs.op, theirs.target, other_spec):
            return False
        if not all(_equal(x, y) or (isinstance(x, LITERALS) and isinstance(y, LITERALS))
                   for x, y in zip(mine, others, strict=True)):  # fmt: skip
            return False
    return True


def _by_mode(graph: Graph, asked: Node, mine: Any, theirs: Any, training: bool) -> Node:
    """Insert a node that returns the literal `mine` in the mode `training` of the module, else the literal `theirs`.
    The node `asked` reads the module's mode when the graph runs.
    """
    both = (mine, theirs) if training else (theirs, mine)
    return graph.call_function(guards.by_mode, (asked, *both))


def _leaves(node: Node, same: Mapping[Node, Node]) -> tuple[list[Any], TreeSpec]:
    """Return (flat arguments, tree spec) of a node; arguments that are nodes are replaced by their counterparts in the
    other graph. `same` maps each node of the graph of `node` to its counterpart.
    """
    return tree_flatten(map_arg((node.args, node.kwargs), lambda n: same[n]))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, slice) and isinstance(b, slice):
        return all(map(_equal, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))
