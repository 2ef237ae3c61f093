"""Module whose forward is a traced graph, with the children and parameters of the original module."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import join

# Attributes of a GraphModule about its generated code; all others are the original module's.
_CODE = {"_graph", "_code", "_lineno_map", "_prologue_start", "_tracer_cls", "_co_fields"}


class TracedModule(GraphModule):
    """Module that runs a graph, with the children, parameters, attributes and hooks of the original module.

    Attributes that the graph lacks (`config`, `get_input_embeddings()`) are looked up in the original class;
    `isinstance` with the original class is False.
    """

    def __init__(self, name: str):
        super().__init__(nn.Module(), Graph(), name)

    @classmethod
    def of(cls, module: nn.Module, graph: Graph, constants: Mapping[str, Any]) -> "TracedModule":
        """Construct a module that runs `graph` in place of the forward of `module`.

        Args:
            module: the original; its children and parameters are shared, not copied.
            graph: traced forward, whose targets are paths below `module`.
            constants: tensors that the graph reads as attributes, by name; they become buffers.
        """
        new = cls(type(module).__name__)
        for name, value in module.__dict__.items():
            if name != "forward":
                new.__dict__[name] = value
        if constants:  # the original module must not get these buffers
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
        """Return this module; the graph reads this attribute where the original forward passes `self` to a child."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("fixed", ()) and value != self.__dict__[name]:
            found = f"the graph was recorded with {name}={self.__dict__[name]!r}"
            hint = "change the attribute (shard_attribute) before the trace"
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
    """Return the path of the submodule `inner` of the module at `path`; either may be the root ``''``."""
    return join(path, inner) if inner else path


def original_class(module: nn.Module) -> type:
    """Return the class of a module, or for a traced module the class that it had before the trace."""
    return module.__dict__.get("original_class", type(module))


def check_reachable(modules: Mapping[str, nn.Module], path: str, what: object) -> None:
    """Raise ScheduleError when the module at `path` was inlined into a graph, so that changing it has no effect.

    Args:
        modules: all modules of the model by path.
        path: path of the module that the schedule is about to change.
        what: the change (directive), for the error.
    """
    end = -1
    while end < len(path):
        above, rest = path[: max(end, 0)], path[end + 1 :]
        module = modules.get(above)
        if module is not None and rest in module.__dict__.get("inlined", ()):
            problem = f"the module was inlined into the graph of {above or 'the model'!r}"
            hint = "schedule the module before that trace, or pass its path in leaves= of trace()"
            raise ScheduleError(path, what, problem, hint)
        dot = path.find(".", end + 1)
        end = len(path) if dot < 0 else dot


def shape_of(node: torch.fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor in the example call; None when the node is no tensor."""
    return node.meta.get("shape")
