"""Move matched graph nodes into a child module of their own."""

from typing import Any

from torch import fx

from slapo_zoo.language.graph.insert import add_child
from slapo_zoo.language.graph.match import Subgraph
from slapo_zoo.language.graph.rewrite import erase, finish, hand_out, insertion_point
from slapo_zoo.language.graph.traced import TracedModule


class GroupModule(TracedModule):
    """A child module that runs some nodes of its owner's graph, so that they can be compiled or recomputed together.

    Submodules that the nodes call stay children of `owner` (the module whose graph had the nodes), so no parameter is
    renamed. The group looks a submodule up at each call, so a later replacement counts in the group, too.
    """

    owner: Any

    @classmethod
    def around(cls, owner: fx.GraphModule, graph: fx.Graph, name: str) -> "GroupModule":
        """Construct a module of class `name` that runs `graph`; its targets `owner.<path>` are submodules of `owner`."""
        new = cls(name)
        new.__dict__["owner"] = owner  # not registered as a child: that would be a cycle
        new.graph = graph
        return new


def group(subgraph: Subgraph, name: str) -> tuple[str, GroupModule]:
    """Move the nodes of a subgraph into a new child module `<name>_<k>`; return (name of the child, child).

    rewrite:  t = f(a); y = g(t, b)  -->  y = self.<name>_0(a, b)
    """
    owner, inside = subgraph.module, set(subgraph.nodes)
    reads = (i for n in subgraph.nodes for i in n.all_input_nodes if i not in inside)
    inputs = list(dict.fromkeys(reads))
    graph = _copy(subgraph, inputs)
    known = {node.name: node for node in inputs}
    outer = Subgraph(subgraph.path, owner, subgraph.nodes, known, subgraph.outputs)
    before = insertion_point(outer)
    child = GroupModule.around(owner, graph, name)
    path = add_child(owner, name, child)
    with owner.graph.inserting_before(before):
        call = owner.graph.call_module(path, tuple(inputs))
        hand_out(call, subgraph.outputs, single=len(subgraph.outputs) == 1)
    erase(subgraph.nodes)
    finish(owner)
    return path, child


def _copy(subgraph: Subgraph, inputs: list[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    same = {node: graph.placeholder(node.name) for node in inputs}
    for node in subgraph.nodes:
        same[node] = graph.node_copy(node, lambda n: same[n])
        if node.op in ("call_module", "get_attr"):
            same[node].target = f"owner.{node.target}"
    outputs = tuple(same[o] for o in subgraph.outputs)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    return graph
