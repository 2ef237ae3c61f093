"""Trace the forward of one module (`trace_module`), or of a module and all modules it calls (`trace_tree`).

A leaf is a module that stays a single `call_module` node.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import join
from slapo_zoo.language.graph.call import Call
from slapo_zoo.language.graph.guards import has_effect
from slapo_zoo.language.graph.modes import merge
from slapo_zoo.language.graph.patches import recording, set_mode, unchanged
from slapo_zoo.language.graph.traced import TracedModule, under
from slapo_zoo.language.graph.tracer import ValueTracer

Leaf = str | type | Callable[[nn.Module, str], bool]
CORE_ATTENTION = "core_attn"  # slapo_zoo.hf.attention.ATTRIBUTE
LEAF_CLASSES = {"Conv1D"}  # the linear layer of GPT-2
Calls = dict[str, tuple[tuple, dict]]


def trace_module(
    module: nn.Module,
    example_args: Iterable[Any] | Mapping[str, Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    leaves: Iterable[Leaf] = (),
    flatten: bool = False,
    where: str = "",
) -> TracedModule:
    """Trace the forward of one module; return a module that runs the graph and has the same children.

    rewrite:  y = f(x)  -->  y = graph(x); the children that it calls stay `call_module` nodes

    Sizes, dtypes and devices are symbolic. Branches that the forward takes on them, and every argument that is
    not a tensor (None included), are fixed by the example and checked in each call. The forward is traced in training
    and in eval mode; a literal that depends on `self.training` is selected at run time.

    Args:
        module: module to trace; it is left unchanged, also after an error.
        example_args: positional arguments of the example call, or all arguments by name.
        example_kwargs: keyword arguments of the example call.
        leaves: modules that stay one node even with `flatten`: paths, class names, classes, predicates (module, path).
            Always one node: torch.nn (not Sequential), Conv1D, `core_attn`, modules with hooks or a replaced forward.
        flatten: trace into the children, too.
        where: path of the module in its model, for errors.

    Raises:
        ScheduleError: the forward cannot be traced; the error names the module, the cause, and what to make a leaf.
    """
    if isinstance(example_args, Mapping):
        example_args, example_kwargs = (), {**example_args, **(example_kwargs or {})}
    call = Call.of(module, where, tuple(example_args), dict(example_kwargs or {}))
    return _trace(call, tuple(leaves), flatten)[0]


def trace_tree(
    module: nn.Module,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    leaves: Iterable[Leaf] = (),
    where: str = "",
) -> dict[str, TracedModule]:
    """Trace a module and all modules that it calls, and return {path below it, '' for itself: traced module}.

    Args:
        module: root of the tree; it stays unchanged.
        args: positional arguments of the example call.
        kwargs: keyword arguments of the example call.
        leaves: modules that are not traced: paths, class names, classes or predicates.
        where: path of the root in its model, for errors.
    """
    call = Call.of(module, where, tuple(args), dict(kwargs))
    traced, calls = _trace(call, tuple(leaves), flatten=False)
    found = {"": traced}
    leaf = leaf_test(tuple(leaves), flatten=False)
    for path, (child_args, child_kwargs) in calls.items():
        child = module.get_submodule(path)
        if not leaf(child, path):
            below = tuple(leaf_below(path, x) for x in leaves)
            tree = trace_tree(child, child_args, child_kwargs, below, join(where, path))
            found |= {p: m for q, m in tree.items() if (p := under(path, q)) not in found}
    return found


def calls_of(module: nn.Module, kwargs: Mapping[str, Any], leaves: tuple[Leaf, ...]) -> Calls:
    """Trace a call of a module; return {path of each leaf that it calls: (args, kwargs) that this leaf receives}.

    Args:
        module: module to trace, also into its children.
        kwargs: keyword arguments of the traced call.
        leaves: modules that stay a single node: paths, class names, classes or predicates.
    """
    call = Call.of(module, "", (), dict(kwargs))
    return _record(call, leaves, flatten=True, training=False)[2].calls


def install(top: nn.Module, traced: Mapping[str, nn.Module]) -> None:
    """Put each module of `traced` below the module `top`, at the path that is its key."""
    for path, module in traced.items():
        parent, _, name = path.rpartition(".")
        top.get_submodule(parent)._modules[name] = module


def trace(model: nn.Module, **kwargs: Any) -> TracedModule:
    """Trace a model to a GraphModule, by default together with all modules that it calls.

    Args:
        model: model to trace; its children are replaced by their traces when `recursive`.
        **kwargs: `example_args` and `example_kwargs` (of the traced call, none by default), `recursive` (default True:
            called modules get graphs too), `flatten` (default False; True: one graph for all), `leaves` or, the same,
            `leaf_modules` (modules that stay one node). ScheduleError: see `trace_module`.
    """
    leaves = tuple(kwargs.pop("leaf_modules", ())) + tuple(kwargs.pop("leaves", ()))
    recursive, flatten = kwargs.pop("recursive", True), kwargs.pop("flatten", False)
    args, named = kwargs.pop("example_args", ()), kwargs.pop("example_kwargs", None) or {}
    if kwargs:
        known = "recursive, flatten, leaf_modules, leaves, example_args, example_kwargs"
        raise ScheduleError("trace", sorted(kwargs), "unknown arguments", f"choose among: {known}")
    if flatten or not recursive:
        return trace_module(model, args, named, leaves, flatten)
    if isinstance(args, Mapping):
        args, named = (), {**args, **named}
    found = trace_tree(model, args, named, leaves)
    top = found.pop("")
    install(top, found)
    return top


def _trace(call: Call, leaves: tuple[Leaf, ...], flatten: bool) -> tuple[TracedModule, Calls]:
    module, where = call.module, call.where or "(the model)"
    if isinstance(module, fx.GraphModule):
        hint = "rewrite its graph, sch[path].mod.graph, or begin with a model that is not traced"
        raise ScheduleError(where, "trace", "this module is traced already", hint)
    if "forward" in module.__dict__:
        problem = "the module's forward was changed, by checkpoint or fork_rng for example"
        raise ScheduleError(where, "trace", problem, "call trace() before that directive")
    mode = module.training
    graph, constants, tracer = _record(call, leaves, flatten, mode)
    try:
        other, others, _ = _record(call, leaves, flatten, not mode)
    except ScheduleError:  # then the graph runs in one mode only
        other, others = None, constants
    same = (x.is_meta or torch.equal(x, others[k]) for k, x in constants.items() if k in others)
    if constants.keys() != others.keys() or not all(same):
        other = None
    merge(graph, mode, other, call.where)
    for node in graph.nodes:
        _forget_values(node)
    children = {} if flatten else tracer.calls
    traced = TracedModule.of(module, graph, constants)
    traced.__dict__["inlined"] = frozenset(tracer.inlined)
    graph.lint()
    return traced, children


def _record(call: Call, leaves: tuple[Leaf, ...], flatten: bool, training: bool) -> Any:
    """Trace `call.module` on the example values in `call`, in training mode if `training`, else in eval mode.
    Each child stays a single node; with `flatten` only the `leaves` do (paths, class names, classes or predicates).
    Returns (graph, {name: tensor that became a constant of the graph}, tracer).
    """
    leaf = leaf_test(leaves, flatten)

    def is_node(module: nn.Module, path: str) -> bool:
        return not flatten or leaf(module, path)

    tracer = ValueTracer(call.where, call.inputs(), is_node)
    before = set(call.module.__dict__)
    with unchanged(call.module), recording(tracer):
        set_mode(call.module, training)
        try:
            graph = tracer.trace(call.module, concrete_args=call.record)  # pyright: ignore[reportArgumentType]
        except ScheduleError:
            raise
        except Exception as error:
            problem = f"the forward cannot be traced: {type(error).__name__}: {error}"
            raise tracer.fail(problem, tracer.leaf_hint()) from error
        new = {k: v for k, v in call.module.__dict__.items() if k not in before}
    constants = {k: v for k, v in new.items() if isinstance(v, Tensor)}
    graph.eliminate_dead_code(is_impure_node=has_effect)
    return graph, constants, tracer


def _forget_values(node: fx.Node) -> None:
    """Replace the example value that a node carries by its shape and dtype, to free memory."""
    value = node.meta.pop("value", None)
    node.meta.pop("of_data", None)
    if isinstance(value, Tensor):
        node.meta["shape"], node.meta["dtype"] = tuple(value.shape), value.dtype


def leaf_test(leaves: tuple[Leaf, ...], flatten: bool) -> Callable[[nn.Module, str], bool]:
    """Return a function (module, path below the traced root) --> True if the module is a leaf: a node without a graph.
    Leaves are `leaves` (paths, class names, classes or predicates), torch.nn modules (not Sequential), Conv1D,
    `core_attn`, modules with a replaced forward and, if `flatten` (one graph for all modules), modules with hooks.
    """

    def given(module: nn.Module, path: str, leaf: Leaf) -> bool:
        if isinstance(leaf, str):
            return leaf in (path, type(module).__name__)
        if isinstance(leaf, type):
            return isinstance(module, leaf)
        return bool(leaf(module, path))

    def is_leaf(module: nn.Module, path: str) -> bool:
        own = type(module).__module__
        if own.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential):
            return True
        changed = "forward" in module.__dict__ or isinstance(module, fx.GraphModule)
        hooked = flatten and bool(module._forward_hooks or module._forward_pre_hooks)
        hooked = hooked or (flatten and bool(module._backward_hooks))
        named = path.endswith(CORE_ATTENTION) or type(module).__name__ in LEAF_CLASSES
        return changed or hooked or named or any(given(module, path, x) for x in leaves)

    return is_leaf


def leaf_below(path: str, leaf: Leaf) -> Leaf:
    """Return `leaf`, a user's choice of leaves, for the trace of the child `path`: "attn.q" becomes "q" in "attn", a
    predicate still gets paths below the root, and a class or any other text stays as it is.
    """
    if isinstance(leaf, str):
        return leaf.removeprefix(path + ".")
    if isinstance(leaf, type):
        return leaf
    return lambda module, p: leaf(module, join(path, p))
