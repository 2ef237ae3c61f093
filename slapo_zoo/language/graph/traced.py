"""A module whose forward is a graph, under the module tree that it had before."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import join

# What a GraphModule keeps about its own code; all else is the module's.
_CODE = {"_graph", "_code", "_lineno_map", "_prologue_start", "_tracer_cls", "_co_fields"}


class TracedModule(GraphModule):
    """The graph of a module, with that module's children, parameters, attributes and hooks.

    What the graph does not have (`config`, `num_heads`, `get_input_embeddings()`) is answered as
    the original class would; `isinstance` with that class is False.
    """

    def __init__(self, name: str):
        super().__init__(nn.Module(), Graph(), name)

    @classmethod
    def of(cls, module: nn.Module, graph: Graph, constants: Mapping[str, Any]) -> "TracedModule":
        """Make a module with this graph as its forward.

        Args:
            module: the original; its children and parameters are shared, by the same containers.
            graph: its targets are paths below `module`.
            constants: tensors that the graph reads by these names.
        """
        new = cls(type(module).__name__)
        for name, value in module.__dict__.items():
            if name != "forward":
                new.__dict__[name] = value
        if constants:  # the original must not grow buffers of our making
            new._buffers = dict(new._buffers)
            new._non_persistent_buffers_set = set(new._non_persistent_buffers_set)
        for name, tensor in constants.items():
            new.register_buffer(name, tensor, persistent=False)
        new.__dict__["original_class"] = type(module)
        plain = [k for k, v in module.__dict__.items() if isinstance(v, (bool, int, float, str))]
        new.__dict__["fixed"] = frozenset(k for k in plain if k[0] != "_" and k != "training")
        new.__dict__["inlined"] = frozenset()
        new.graph = graph
        return new

    @property
    def itself(self) -> "TracedModule":
        """Return the module that a graph passes where the original forward passes `self` to a child."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("fixed", ()) and value != self.__dict__[name]:
            found = f"its graph was recorded with {name}={self.__dict__[name]!r}"
            hint = "change it (shard_attribute) before the trace"
            raise ScheduleError(type(self).__name__, f"{name}={value!r}", found, hint)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original_class")
            if original is None or not hasattr(original, name):
                raise
            found = inspect.getattr_static(original, name)
            return found.__get__(self, type(self)) if hasattr(found, "__get__") else found

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedModule":
        new = TracedModule(type(self).__name__)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            if name not in _CODE:
                new.__dict__[name] = copy.deepcopy(value, memo)
        new.graph = copy.deepcopy(self._graph, memo)
        return new


def under(path: str, inner: str) -> str:
    """The path of what lies at `inner` below `path`; either may be the root ``''``."""
    return join(path, inner) if inner else path


def original_class(module: nn.Module) -> type:
    """The class of a module before it was traced."""
    return module.__dict__.get("original_class", type(module))


def check_reachable(modules: Mapping[str, nn.Module], path: str, what: object) -> None:
    """Raise when a trace has inlined the module at `path`: a change to it would have no effect."""
    end = -1
    while end < len(path):
        above, rest = path[: max(end, 0)], path[end + 1 :]
        module = modules.get(above)
        if module is not None and rest in module.__dict__.get("inlined", ()):
            problem = f"it was inlined into the graph of {above or 'the model'!r}"
            hint = "schedule it before that trace, or name it in leaves="
            raise ScheduleError(path, what, problem, hint)
        dot = path.find(".", end + 1)
        end = len(path) if dot < 0 else dot


def shape_of(node: torch.fx.Node) -> tuple[int, ...] | None:
    """The shape that a node's tensor had during the trace, or None when it is no tensor."""
    return node.meta.get("shape")
