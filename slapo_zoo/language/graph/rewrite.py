"""Replace matched nodes of a graph by calls of other functions or modules."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import join
from slapo_zoo.language.graph.guards import GUARDS, has_effect
from slapo_zoo.language.graph.insert import (
    arguments,
    called,
    carry_parameters,
    insert_call,
    operand,
)
from slapo_zoo.language.graph.match import Subgraph


def replace_node(
    owner: fx.GraphModule,
    node: fx.Node,
    new: Any,
    path: str = "",
    name: str = "",
    constants: Mapping[str, Any] | None = None,
) -> None:
    """Replace the function or module that one node calls, and keep its arguments.

    rewrite:  y = f(x, flag=True)  -->  y = new(x, flag=True)

    Args:
        owner: traced module whose graph is changed.
        node: node to replace.
        new: function or module to call instead.
        path: path of `owner`, for errors.
        name: name of the new child module.
        constants: additional keyword arguments of `new`.
    """
    if node.op not in ("call_function", "call_method", "call_module"):
        problem = f"{node.name} is a {node.op}, which computes nothing"
        hint = "name a node that calls a function or a module"
        raise ScheduleError(path or "(the model)", "replace", problem, hint)
    check_hooks([node], owner, path)
    with owner.graph.inserting_after(node):
        kwargs = {**node.kwargs, **(constants or {})}
        call = insert_call(owner, new, node.args, kwargs, name)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    _remove(owner, [node])


def replace_vertical(
    subgraph: Subgraph,
    new: Any,
    name: str = "",
    carry: bool = False,
    constants: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Replace a subgraph, whose nodes read each other's results, by one call; return the new node.

    rewrite:  t = f(a, b); y = g(t, c)  -->  y = new(a, b, c)

    Inputs are passed by name where the pattern's arguments have the names of parameters of `new`, else by position.

    Args:
        subgraph: the nodes to replace.
        new: a function or module; returns a tuple for a pattern with several outputs.
        name: name of the new child module.
        carry: give the module `new` the parameters of the modules that it replaces, by name.
        constants: additional keyword arguments of `new`.
    """
    return _replace(subgraph, new, name, carry, constants, single=len(subgraph.outputs) == 1)


def replace_horizontal(
    subgraphs: Sequence[Subgraph],
    new: Any,
    name: str = "",
    carry: bool = False,
    constants: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Replace several subgraphs that read the same inputs by one call, and return the new node.

    rewrite:  q = f(x); k = g(x); v = h(x)  -->  r = new(x); q = r[0]; k = r[1]; v = r[2]

    Args:
        subgraphs: subgraphs with one output each; item i of the result of `new` replaces output i.
        new: a function or module; returns a sequence.
        name: name of the new child module.
        carry: give `new` the parameters of the replaced modules, concatenated along axis 0 in order.
        constants: additional keyword arguments of `new`.
    """
    first = subgraphs[0]
    owner = first.module
    for other in subgraphs[1:]:
        same = other.module is owner and list(other.inputs.values()) == list(first.inputs.values())
        if not same or len(other.outputs) != 1 or len(first.outputs) != 1:
            problem = f"{other} and {first} do not have the same inputs and one output each"
            hint = "replace them one by one, or find subgraphs that read the same values"
            raise ScheduleError(first.path or "(the model)", "replace", problem, hint)
    outputs = tuple(s.outputs[0] for s in subgraphs)
    nodes = tuple(n for n in owner.graph.nodes if any(n in s.nodes for s in subgraphs))
    merged = Subgraph(first.path, owner, nodes, first.inputs, outputs)
    return _replace(merged, new, name, carry, constants, joined=True)


def _replace(
    subgraph: Subgraph, new: Any, name: str, carry: bool, constants: Mapping[str, Any] | None,
    single: bool = False, joined: bool = False,
) -> fx.Node:  # fmt: skip
    """Replace a subgraph by one call of `new`, and return the call's node.

    With `single` the call returns the only output itself, else a sequence of outputs. `carry`: a module `new` gets the
    replaced modules' parameters of the same names and shapes (ScheduleError if they differ), concatenated along axis 0
    if `joined`. `constants` are keyword arguments of `new`. A module `new` becomes the child `<name>_<k>`.
    """
    owner, before = subgraph.module, insertion_point(subgraph)
    check_hooks(subgraph.nodes, owner, subgraph.path)
    if carry:
        modules = [called(owner, n) for n in subgraph.nodes]
        carry_parameters(new, modules, subgraph.path, joined)
    with owner.graph.inserting_before(before):
        inputs = {k: operand(owner.graph, v) for k, v in subgraph.inputs.items()}
        args, kwargs = arguments(new, inputs, subgraph.path, constants)
        call = insert_call(owner, new, args, kwargs, name)
        hand_out(call, subgraph.outputs, single)
    _remove(owner, subgraph.nodes)
    return call


def insertion_point(subgraph: Subgraph) -> fx.Node:
    """Return the node before which a call can replace a subgraph: the inputs are computed, no output is used yet.
    Raises ScheduleError when there is no such node.
    """
    order = {node: i for i, node in enumerate(subgraph.module.graph.nodes)}
    inside = set(subgraph.nodes)
    users = [u for o in subgraph.outputs for u in o.users if u not in inside]
    last = subgraph.nodes[-1]
    before = min([*users, last.next], key=lambda n: order.get(n, len(order)))
    inputs = [n for v in subgraph.inputs.values() for n in _nodes_in(v)]
    late = [n.name for n in inputs if order[n] >= order.get(before, len(order))]
    if late:
        problem = f"{subgraph} reads {late}, computed only after {before.name} has used its result"
        hint = "match a subgraph whose inputs are all computed before its results are used"
        raise ScheduleError(subgraph.path or "(the model)", "replace", problem, hint)
    return before


def _remove(owner: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    targets = [str(n.target) for n in nodes if n.op == "call_module"]
    erase(nodes)
    finish(owner)
    drop_modules(owner, targets)


def check_hooks(nodes: Iterable[fx.Node], owner: nn.Module, path: str) -> None:
    """Raise ScheduleError when a module that one of `nodes` calls has hooks, which a replacement
    would drop silently. `owner` is the traced module that has these nodes, `path` its path.
    """
    for node in nodes:
        module = called(owner, node)
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            problem = "the module has hooks (from sync() or hook()), which a replacement would drop"
            hint = "call replace() first, then sync() or hook() on the new module"
            raise ScheduleError(join(path, str(node.target)), "replace", problem, hint)


def finish(owner: fx.GraphModule) -> None:
    """Remove unused nodes from the graph of `owner`, check the graph, and regenerate the code of `owner`."""
    owner.graph.eliminate_dead_code(is_impure_node=has_effect)
    owner.graph.lint()
    owner.recompile()


def hand_out(call: fx.Node, outputs: Sequence[fx.Node], single: bool) -> None:
    """Replace all uses of `outputs[i]` by item i of the result of `call`, or, if `single`, by the result itself."""
    for i, output in enumerate(outputs):
        graph = call.graph
        new = call if single else graph.call_function(operator.getitem, (call, i))
        new.meta = dict(output.meta)
        output.replace_all_uses_with(new)


def erase(nodes: Sequence[fx.Node]) -> None:
    """Remove `nodes` and the runtime checks that read them; no other node may use their values any more."""
    for node in reversed(nodes):
        for user in [u for u in node.users if u.target in GUARDS]:
            node.graph.erase_node(user)
        node.graph.erase_node(node)


def drop_modules(owner: fx.GraphModule, targets: Iterable[str]) -> None:
    """Delete the submodules at the paths `targets` that no graph of `owner` calls any more."""
    used = {str(n.target) for n in owner.graph.nodes if n.op in ("call_module", "get_attr")}
    for child in owner.children():
        if isinstance(child, fx.GraphModule):  # a group calls the modules of its owner
            used |= {str(n.target).removeprefix("owner.") for n in child.graph.nodes}
    for target in targets:
        if not any(u == target or u.startswith(target + ".") for u in used):
            owner.delete_submodule(target)


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(value, found.append)
    return found
