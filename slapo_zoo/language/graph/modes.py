"""Merge a trace in training mode and a trace in eval mode into one graph that is right in both.

A forward reads `self.training` as a Python bool, so a trace fixes it: a dropout traced in training mode would
keep dropping in `eval()`. Literals that differ between the traces become nodes that read the mode.
"""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from slapo_zoo.language.graph import guards


def merge(graph: Graph, training: bool, other: Graph | None, where: str) -> bool:
    """Make `graph` right in both modes, using a trace in the other mode.

    Args:
        graph: graph that was traced in the mode `training`; it is changed in place.
        training: True when `graph` was traced in training mode.
        other: trace in the other mode; None when that trace failed.
        where: path of the traced module, for the check.

    Returns:
        True when the graph is right in both modes; otherwise it now raises when run in the other mode.
    """
    if other is None or not _same_shape(graph, other):
        nodes = _training(graph)
        with graph.inserting_after(nodes):
            said = "self.training"
            graph.call_function(guards.expect, (nodes, training, where or "(the model)", said))
        return False
    same = dict(zip(other.nodes, graph.nodes, strict=True))
    asked: Node | None = None
    for theirs, node in list(same.items()):
        args = map_arg((theirs.args, theirs.kwargs), lambda n: same[n])
        if _equal((node.args, node.kwargs), args):
            continue
        asked = asked or _training(graph)
        with graph.inserting_before(node):
            mixed = _mix((node.args, node.kwargs), args, graph, asked, training)
        node.args, node.kwargs = mixed
    return True


def _training(graph: Graph) -> Node:
    """Insert a node that reads `self.training` at the start of the graph, and return it."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before():
        module = graph.create_node("get_attr", "itself")
    with graph.inserting_after(module):
        return graph.call_function(getattr, (module, "training"))


def _same_shape(a: Graph, b: Graph) -> bool:
    """Return whether two graphs have the same nodes and differ in literals only."""
    if len(a.nodes) != len(b.nodes):
        return False
    same = dict(zip(b.nodes, a.nodes, strict=True))
    for theirs, node in same.items():
        if (node.op, node.target) != (theirs.op, theirs.target):
            return False
        args = map_arg((theirs.args, theirs.kwargs), lambda n: same[n])
        if not _mixable((node.args, node.kwargs), args):
            return False
    return True


def _mixable(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_mixable, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_mixable(a[k], b[k]) for k in a)
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    return _equal(a, b) or all(isinstance(v, (bool, int, float, str)) or v is None for v in (a, b))


def _mix(mine: Any, theirs: Any, graph: Graph, asked: Node, training: bool) -> Any:
    """Return the arguments `mine`, in which the node `asked` (the mode) selects each literal that differs from `theirs`."""
    if isinstance(mine, (tuple, list)):
        return type(mine)(
            _mix(m, t, graph, asked, training) for m, t in zip(mine, theirs, strict=True)
        )
    if isinstance(mine, dict):
        return {k: _mix(v, theirs[k], graph, asked, training) for k, v in mine.items()}
    if isinstance(mine, Node) or _equal(mine, theirs):
        return mine
    both = (mine, theirs) if training else (theirs, mine)
    return graph.call_function(guards.by_mode, (asked, *both))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, slice) and isinstance(b, slice):
        return _equal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, torch.Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)
