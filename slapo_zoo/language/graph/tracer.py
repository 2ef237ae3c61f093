"""fx tracer whose proxies carry example values, real or meta.

A forward may thus unpack shapes, compare sizes and ask for types. Sizes are nodes, so the graph works for other
batch and sequence sizes; Python branches on them are checked when the graph runs (`guards`).
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph import guards
from slapo_zoo.language.graph.proxy import (
    UNKNOWN,
    ValueProxy,
    depends_on_data,
    has_proxy,
    location,
    values_of,
)
from slapo_zoo.language.graph.traced import under

EXAMPLE_HINT = "pass example_inputs: a tuple of arguments, or a dict of them by name"


class ValueTracer(fx.Tracer):
    """Tracer of one module into a graph; each proxy carries the value that it stands for in the example call.

    Args:
        where: path of the module, for errors.
        inputs: name of each placeholder --> its example value.
        is_leaf: (module, path below the root) --> True if the module stays a `call_module` node.
    """

    proxy_buffer_attributes = True

    def __init__(
        self, where: str, inputs: Mapping[str, Any], is_leaf: Callable[[nn.Module, str], bool]
    ):
        super().__init__(autowrap_modules=(math,))
        self.where, self.inputs, self.is_leaf = where, inputs, is_leaf
        self.calls: dict[str, tuple[tuple, dict]] = {}  # arguments of each leaf
        self.inlined: set[str] = set()
        self.evaluating = 0
        self.checked: set[fx.Node] = set()
        self.ranks: set[fx.Node] = set()

    def fail(self, problem: str, hint: str) -> ScheduleError:
        """Return (not raise) a ScheduleError with problem and hint, the innermost traced module and its source line."""
        return ScheduleError(self.path(), "trace", f"{problem} (at {location()})", hint)

    def path(self) -> str:
        """Return the path of the module whose forward is being traced."""
        return under(self.where, self.scope.module_path) or "(the model)"

    def leaf_hint(self) -> str:
        """Return the hint of an error about a forward that cannot be traced: which module to keep as a single node."""
        inner = self.scope.module_path
        if not inner:
            return "trace each module below this one by itself, or schedule this module without a graph"
        return f"keep that module as a single node: pass leaves=({inner!r},)"

    # -- nodes and their values -----------------------------------------------------------------

    def proxy(self, node: fx.Node) -> ValueProxy:
        return ValueProxy(node, self)

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple,
        kwargs: dict,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        if name is None and target == "self":  # BertAttention.self: code would rebind self
            name = "self_module"
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind == "output":
            return node
        node.meta["value"] = self.inputs.get(target) if kind == "placeholder" else self.run(node)
        node.meta["of_data"] = depends_on_data(node)
        return node

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any):
        """Return fx's proxy of a new node; None if the node's example value is None, so that `x is None` is true."""
        proxy: Any = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        node = proxy.node
        if node.meta["value"] is not None or kind in ("placeholder", "get_attr"):
            return proxy
        if target is not operator.setitem:
            self.check(node, None)
        return None

    def run(self, node: fx.Node) -> Any:
        """Return the example value of a node, computed from the example values of its arguments."""
        if any(n.meta["value"] is UNKNOWN for n in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["value"])
        self.evaluating += 1
        try:
            with torch.no_grad():
                return self._call(node, args, kwargs)
        except ScheduleError:
            raise
        except Exception as error:
            problem = f"{node.target} fails on the example inputs: {type(error).__name__}: {error}"
            raise self.fail(problem, self.leaf_hint()) from error
        finally:
            self.evaluating -= 1

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root) if target != "itself" else self.root
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    # -- decisions --------------------------------------------------------------------------------

    def read(self, proxy: ValueProxy) -> Any:
        """Return the example value that a Python branch reads from a proxy, and add a check of this value to the graph;
        ScheduleError if the value is UNKNOWN or depends on the elements of a tensor.
        """
        node = proxy.node
        value = node.meta["value"]
        if value is UNKNOWN:
            problem = f"an `if` of the forward reads {node.name}, which has no example value"
            raise self.fail(problem, EXAMPLE_HINT)
        if isinstance(value, Tensor) or node.meta["of_data"]:
            problem = f"an `if` or int() reads the elements of a tensor ({node.name})"
            raise self.fail(problem, self.leaf_hint())
        self.check(node, value)
        return value

    def check(self, node: fx.Node, expected: Any) -> None:
        """Add a check to the graph, once per node: a call in which `node` has not the value `expected` raises ScheduleError."""
        if node in self.checked:
            return
        self.checked.add(node)
        args = (node, expected, self.path(), f"{node.name} at {location()}")
        self.create_node("call_function", guards.expect, args, {})

    def check_length(self, proxy: ValueProxy) -> None:
        """Add a check to the graph: ScheduleError in a call in which `proxy`, a shape, has another number of axes."""
        if proxy.node not in self.ranks:
            self.ranks.add(proxy.node)
            length: Any = self.create_proxy("call_function", len, (proxy,), {})
            self.read(length)

    # -- arguments --------------------------------------------------------------------------------

    def create_arg(self, a: Any) -> Any:
        if type(a) is ValueProxy:
            return a.node
        if isinstance(a, nn.Module):
            return self._module_arg(a)
        if is_dataclass(a) and not isinstance(a, type):  # an output class of transformers
            given = {f.name: getattr(a, f.name) for f in fields(a)}
            given = {name: self.create_arg(v) for name, v in given.items() if v is not None}
            return self.create_node("call_function", type(a), (), given)
        try:
            return super().create_arg(a)
        except (NotImplementedError, NameError) as error:
            problem = f"a graph cannot store an argument of type {type(a).__name__} ({error})"
            hint = "if it is a KV cache, call with use_cache=False; else " + self.leaf_hint()
            raise self.fail(problem, hint) from None

    def _module_arg(self, module: nn.Module) -> fx.Node:
        if module is not self.root and self.submodule_paths and module not in self.submodule_paths:
            raise self.fail(
                f"the forward uses a {type(module).__name__} that is no submodule of the model",
                self.leaf_hint(),
            )
        path = "itself" if module is self.root else self.path_of_module(module)
        return self.create_node("get_attr", path, (), {})

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Add a placeholder to the graph for each argument of the example call, with its name and default.

        This overrides a method of fx.Tracer: `concrete_args` is a function, the method `record` of the example `Call`;
        its result is returned: (function to trace, list of this function's arguments).
        """
        return concrete_args(self)

    # -- modules ----------------------------------------------------------------------------------

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.is_leaf(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict) -> Any:
        if self.evaluating:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if self.evaluating:
            return forward(*args, **kwargs)
        path = (self.submodule_paths or {}).get(m)
        if path is None:  # made inside a forward, such as a loss: its calls are recorded
            return forward(*args, **kwargs)
        if not self.is_leaf(m, path):
            self.inlined.add(path)
        elif path not in self.calls:
            self.calls[path] = values_of((args, kwargs))
        return super().call_module(m, forward, args, kwargs)


def recorded(tracer: ValueTracer, function: Callable, always: bool = False) -> Callable:
    """Return a wrapper of a function that torch does not dispatch on proxies; its calls with proxies become graph nodes.

    Args:
        tracer: tracer that gets the nodes; calls in other threads than this one add none.
        function: function to wrap, e.g. `torch.arange`.
        always: add a node even without a proxy among the arguments (random functions).
    """

    mine = get_ident()

    def record(*args: Any, **kwargs: Any) -> Any:
        is_mine = get_ident() == mine and not tracer.evaluating
        if is_mine and (always or has_proxy(args, kwargs)):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record
