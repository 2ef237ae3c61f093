"""Insert calls into a graph: choose their arguments, name new child modules, and hand over parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph.canonical import ModuleTensor


class Function(nn.Module):
    """Module that a graph calls in place of a lambda or local function, which the generated code could not name."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        self.__signature__ = inspect.signature(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the wrapped function for these arguments."""
        return self.function(*args, **kwargs)


def arguments(
    new: Any, inputs: dict[str, Any], path: str, constants: Mapping[str, Any] | None = None
) -> tuple[tuple, dict[str, Any]]:
    """Return (args, kwargs) with which a graph calls `new`: by name if the signature of `new` has all names in `inputs`
    and requires no other, else by position. ScheduleError if `new` takes another number of arguments.

    Args:
        new: function or module that replaces a subgraph.
        inputs: name of each pattern argument --> its value in the graph.
        path: path of the traced module, for errors.
        constants: additional keyword arguments of `new`.
    """
    constants = dict(constants or {})
    target = getattr(new, "forward", new) if isinstance(new, nn.Module) else new
    target = new.function if isinstance(new, Function) else target
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:  # builtins of torch have no signature
        return tuple(inputs.values()), constants
    varies = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    plain = [p for p in plain if p.name not in constants]
    required = [p.name for p in plain if p.default is p.empty]
    names = {p.name for p in plain}
    if inputs.keys() <= names and set(required) <= inputs.keys():
        by_position = [p for p in plain if p.name in inputs and p.kind is p.POSITIONAL_ONLY]
        if not by_position:
            return (), {**inputs, **constants}
    if varies or len(required) <= len(inputs) <= len(plain):
        return tuple(inputs.values()), constants
    takes = [p.name for p in plain]
    problem = f"the subgraph has the inputs {list(inputs)}, {_name(new)} takes {takes}"
    hint = (
        f"give {_name(new)} one parameter per input of the subgraph, in that order, or name its parameters "
        "as the pattern function names its own"
    )
    raise ScheduleError(path or "(the model)", "replace", problem, hint)


def insert_call(owner: fx.GraphModule, new: Any, args: Any, kwargs: Any, name: str = "") -> fx.Node:
    """Insert a call `new(*args, **kwargs)` at the current insertion point of the graph of `owner`; return the new node.
    A module `new` is first added to `owner` as a child `<name>_<k>`; `name` is by default the name of its class.
    """
    if not isinstance(new, nn.Module):
        qualified = getattr(new, "__qualname__", "")
        if "<" not in qualified:
            return owner.graph.call_function(new, args, kwargs)
        name = name or qualified.rpartition(".")[2].replace("<lambda>", "Lambda")
        new = Function(new)
    child = add_child(owner, name or _name(new), new)
    return owner.graph.create_node("call_module", child, args, kwargs)


def add_child(owner: nn.Module, name: str, module: nn.Module) -> str:
    """Add a module to `owner` as child `<name>_<k>`, with the first free number k; return the child's name."""
    k = next(k for k in range(10**6) if not hasattr(owner, f"{name}_{k}"))
    module.train(owner.training)
    owner.add_module(f"{name}_{k}", module)
    return f"{name}_{k}"


def called(owner: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the submodule of `owner` that a `call_module` node calls; None for other nodes."""
    return owner.get_submodule(str(node.target)) if node.op == "call_module" else None


def carry_parameters(
    new: Any, modules: Sequence[nn.Module | None], path: str, joined: bool = False
) -> None:
    """Give a new module the parameters of the modules that it replaces; ScheduleError if names or shapes do not fit.

    Args:
        new: module with parameters of the same names; any other object is left alone.
        modules: the replaced modules in order; None entries are skipped.
        path: path of the traced module, for errors.
        joined: concatenate the parameters of all modules along axis 0.
    """
    old = [m for m in modules if m is not None]
    for name, parameter in list(getattr(new, "_parameters", {}).items()):
        given = [p for m in old if (p := m._parameters.get(name)) is not None]
        shape = tuple(torch.cat([p.detach() for p in given]).shape) if given and joined else None
        shape = tuple(given[0].shape) if len(given) == 1 else shape
        if parameter is None and not given:
            continue
        if parameter is None or shape != tuple(parameter.shape):
            found = [tuple(p.shape) for p in given]
            has = "is None" if parameter is None else f"has shape {tuple(parameter.shape)}"
            problem = f"{name!r} of {_name(new)} {has}, the replaced modules have {found or 'none'}"
            hint = "give the new module parameters of the same names and shapes, or leave out carry=True"
            raise ScheduleError(path or "(the model)", "replace(carry=True)", problem, hint)
        whole = given[0] if len(given) == 1 else nn.Parameter(torch.cat([p.detach() for p in given]))  # fmt: skip
        new._parameters[name] = whole


def operand(graph: fx.Graph, value: Any) -> Any:
    """Return `value`, which a pattern argument matched, as an input for new nodes of `graph`: a new `get_attr` node
    for a ModuleTensor (a parameter of a submodule), else `value` itself.
    """
    if isinstance(value, ModuleTensor):
        return graph.get_attr(f"{value.target}.{value.name}")
    return value


def _name(new: Any) -> str:
    return getattr(new, "__name__", type(new).__name__)
