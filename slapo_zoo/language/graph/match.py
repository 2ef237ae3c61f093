"""Match a traced pattern against a graph: equal operations, arguments and constants, no outside use of inner values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from slapo_zoo.language.graph.canonical import COMMUTATIVE, DIMS, ModuleTensor, describe
from slapo_zoo.language.graph.guards import GUARDS
from slapo_zoo.language.graph.pattern import ANY, ModulePattern, call_module, name_matches
from slapo_zoo.language.graph.traced import shape_of

ARITHMETIC = {"add", "sub", "mul", "div", "pow"}
Binding = dict[fx.Node, Any]  # node of the pattern -> node, constant or ModuleTensor


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Nodes of one graph that match a pattern; iterating yields (path, node) pairs.

    Args:
        path: path of the traced module that owns the graph.
        module: the traced module.
        nodes: the matched nodes, in graph order.
        inputs: name of each pattern argument --> the node, constant or parameter (ModuleTensor) that it matched.
        outputs: nodes whose values the pattern returns.
    """

    path: str
    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    inputs: dict[str, Any]
    outputs: tuple[fx.Node, ...]

    def __iter__(self) -> Iterator[tuple[str, fx.Node]]:
        return iter([(self.path, node) for node in self.nodes])

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> tuple[str, fx.Node]:
        return self.path, self.nodes[index]

    def __repr__(self) -> str:
        return f"<{' -> '.join(n.name for n in self.nodes)} in {self.path or '(the model)'!r}>"


class Matches(list[Subgraph]):
    """List of the matches of a pattern in a graph, in graph order.

    Attributes:
        overlapping: matches that were dropped because they share a node with an earlier match.
        rejected: (output node, reason as text) of subgraphs that match but cannot be replaced by one call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.overlapping: list[Subgraph] = []
        self.rejected: list[tuple[fx.Node, str]] = []


@dataclass
class Matcher:
    """Search for one pattern in one graph.

    Args:
        pattern: the traced pattern.
        module: module whose graph is searched.
        path: path of the module.
    """

    pattern: fx.GraphModule
    module: fx.GraphModule
    path: str = ""
    found: Matches = field(default_factory=Matches)

    def __post_init__(self):
        made = (n for n in self.module.graph.nodes if n.op != "get_attr")
        self.shapes_known = any(shape_of(n) is not None for n in made)

    def search(self) -> Matches:
        """Return all matches of the pattern in graph order; of two matches that share a node, the first is kept."""
        output = next(n for n in self.pattern.graph.nodes if n.op == "output").args[0]
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        taken: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            match = self._anchored(outputs, node)
            if match is None:
                continue
            if taken & set(match.nodes):
                self.found.overlapping.append(match)
                continue
            taken |= set(match.nodes)
            self.found.append(match)
        return self.found

    def _anchored(self, outputs: Sequence[Any], node: fx.Node) -> Subgraph | None:
        """Return the match whose first output is `node`, or None. If nodes match but one call cannot replace them (e.g.
        others use an inner value), add the reason to `self.found.rejected`. `outputs`: nodes that the pattern returns.
        """
        reason = ""
        for binding in self._outputs(outputs[1:], self._value(outputs[0], node, {})):
            calls = {p: v for p, v in binding.items() if p.op not in ("placeholder", "get_attr")}
            reason = self._escapes(calls, binding, outputs)
            if not reason:
                inputs = {p.target: binding[p] for p in self.pattern.graph.nodes
                          if p.op == "placeholder"}  # fmt: skip
                nodes = tuple(n for n in self.module.graph.nodes if n in set(calls.values()))
                ends = tuple(binding[o] for o in outputs)
                return Subgraph(self.path, self.module, nodes, inputs, ends)
        if reason:
            self.found.rejected.append((node, reason))
        return None

    def _outputs(self, rest: Any, bindings: Iterator[Binding]) -> Iterator[Binding]:
        if not rest:
            yield from bindings
            return
        for binding in bindings:
            for node in self.module.graph.nodes:
                yield from self._outputs(rest[1:], self._value(rest[0], node, binding))

    def _escapes(self, calls: Binding, binding: Binding, outputs: Sequence[fx.Node]) -> str:
        """Return why one call cannot replace the matched nodes (e.g. others use an inner value), or '' if it can.

        Args:
            calls: the nodes to replace: call node of the pattern --> graph node that it matched.
            binding: `calls`, and the pattern's inputs and parameters --> node, constant or parameter that each matched.
            outputs: nodes of the pattern that it returns.
        """
        inside = set(calls.values())
        ends = {binding[o] for o in outputs}
        for node in inside - ends:
            outside = [u for u in node.users if u not in inside and u.target not in GUARDS]
            if outside:
                return f"{node.name} is also used by {outside[0].name}"
        values = [v for p, v in binding.items() if p.op == "placeholder"]
        seen, todo = set(), [v for v in values if isinstance(v, fx.Node)]
        while todo:
            node = todo.pop()
            if node in inside:
                return f"{node.name} lies on the way to an input of the pattern"
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return ""

    # -- one value, one node, all arguments -------------------------------------------------------

    def _value(self, p: Any, v: Any, binding: Binding, rank: int = 0) -> Iterator[Binding]:
        if isinstance(p, fx.Node):
            yield from self._node(p, v, binding)
        elif isinstance(p, (tuple, list)) and isinstance(v, (tuple, list)) and len(p) == len(v):
            yield from self._all([(a, b, 0) for a, b in zip(p, v, strict=True)], binding)
        elif p is ANY or _equal(p, v) or _same_dim(p, v, rank):
            yield binding

    def _node(self, p: fx.Node, v: Any, binding: Binding) -> Iterator[Binding]:
        if p in binding:
            if binding[p] is v or (not isinstance(v, fx.Node) and _equal(binding[p], v)):
                yield binding
        elif p.op == "placeholder":
            yield {**binding, p: v}
        elif p.op == "get_attr":  # a pattern's parameter matches any parameter
            if isinstance(v, ModuleTensor) or (isinstance(v, fx.Node) and v.op == "get_attr"):
                yield {**binding, p: v}
        elif isinstance(v, fx.Node) and v.op.startswith("call") and self._free(v, binding):
            for pairs in self._alignments(p, v):
                yield from self._all(pairs, {**binding, p: v})

    def _free(self, v: fx.Node, binding: Binding) -> bool:
        """Return True if no operation of the pattern has matched the graph node `v`; inputs of the pattern may have.
        `binding` holds the matches so far: node of the pattern --> node, constant or parameter that it matched.
        """
        return all(b is not v or p.op == "placeholder" for p, b in binding.items())

    def _all(self, pairs: list[tuple[Any, Any, int]], binding: Binding) -> Iterator[Binding]:
        if not pairs:
            yield binding
            return
        (p, v, rank), *rest = pairs
        for found in self._value(p, v, binding, rank):
            yield from self._all(rest, found)

    def _alignments(self, p: fx.Node, v: fx.Node) -> Iterator[list[tuple[Any, Any, int]]]:
        """Yield each way to pair the arguments of pattern node `p` with those of graph node `v`: none if the operations
        differ, two if the operation commutes. Each way is a list of (argument of p, argument of v, number of axes of
        v's tensor if the argument is an axis, else 0).
        """
        regex = self._regex(p)
        if regex:
            if v.op == "call_module" and name_matches(regex, str(v.target)):
                args = p.args[1:] if p.target is call_module else p.args
                edges = [a for a in [*v.args, *v.kwargs.values()] if isinstance(a, fx.Node)]
                if len(args) == len(edges):
                    yield [(a, b, 0) for a, b in zip(args, edges, strict=True)]
            return
        mine = describe(p, self.pattern, in_pattern=True)
        theirs = describe(v, self.module)
        if mine.name != theirs.name or mine.arguments.keys() != theirs.arguments.keys():
            return
        if mine.name in ARITHMETIC and self.shapes_known and shape_of(v) is None:
            return  # arithmetic on sizes is no tensor operation
        rank = len(shape_of(v) or ())
        pairs = [(mine.arguments[k], theirs.arguments[k], rank if k in DIMS else 0) for k in mine.arguments]  # fmt: skip
        yield pairs
        if mine.name in COMMUTATIVE:
            (a, x, _), (b, y, _), *rest = pairs
            yield [(a, y, 0), (b, x, 0), *rest]

    def _regex(self, p: fx.Node) -> str:
        if p.target is call_module:
            return str(p.args[0])
        if p.op == "call_module":
            module = self.pattern.get_submodule(str(p.target))
            return module.name if isinstance(module, ModulePattern) else ""
        return ""


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    if isinstance(a, slice) and isinstance(b, slice):
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _same_dim(p: Any, v: Any, rank: int) -> bool:
    """Return whether `p` and `v` name the same axis of a tensor with `rank` axes, e.g. -1 and 2 if it has 3."""
    return rank > 0 and isinstance(p, int) and isinstance(v, int) and p % rank == v % rank
