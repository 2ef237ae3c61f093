"""fx proxy that carries an example value: sizes stay symbolic, and a Python branch on a size adds a check to the graph."""

import dis
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx import Proxy

# Functions whose result is a number, or has a size, that depends on a tensor's elements.
DATA_DEPENDENT = {"item", "tolist", "numpy", "nonzero", "unique", "unique_consecutive", "argwhere"}
DATA_DEPENDENT |= {"masked_select", "bincount"}
NOT_THE_MODEL = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")


def values_of(value: Any) -> Any:
    """Return the nested structure `value` with every proxy replaced by its example value."""
    if type(value) is ValueProxy:
        return value.node.meta["value"]
    if type(value) in (tuple, list):
        return type(value)(values_of(v) for v in value)
    if type(value) is dict:
        return {key: values_of(v) for key, v in value.items()}
    return value


def location() -> str:
    """Return "file:line" of the model code that is being traced."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_MODEL):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def depends_on_data(node: fx.Node) -> bool:
    """Return whether a node computes a size or number that depends on the elements of a tensor."""
    if any(n.meta.get("of_data") for n in node.all_input_nodes):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op in ("call_function", "call_method") and name in DATA_DEPENDENT:
        return True
    return node.target is operator.getitem and _selects_by_mask(node.args[1])


def _selects_by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    values = [part.meta["value"] for part in parts if isinstance(part, fx.Node)]
    return any(isinstance(v, Tensor) and v.dtype == torch.bool for v in values)


class Unknown:
    """Type of `UNKNOWN`: the example value of an argument of which a trace knows only that it is a tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Tensor, name)


UNKNOWN = Unknown()
CONTAINERS = (tuple, list, dict)  # torch.Size is a tuple, an output of transformers is a dict


class ValueProxy(Proxy):
    """fx proxy with an example value; `len`, iteration and attributes are those of the value.

    An `if`, a `range` or an `int()` on a size reads the value, and the tracer adds a check to the graph. An
    `if` on the elements of a tensor raises an error, because the graph could not follow it.
    """

    if TYPE_CHECKING:  # Proxy gets its operators at run time

        def __getitem__(self, index: Any) -> Any: ...

    def __getattr__(self, name: str) -> Any:
        if name in ("node", "tracer"):
            raise AttributeError(f"a traced value has no {name!r} yet: do not copy or pickle it")
        if callable(getattr(self.node.meta["value"], name)):
            return Method(self, name)
        return _tracer(self).create_proxy("call_function", getattr, (self, name), {})

    def __bool__(self) -> bool:
        value = self.node.meta["value"]
        if isinstance(value, CONTAINERS):
            return len(self) > 0
        drawn = _decided_for_any_draw(self.node)
        return drawn if drawn is not None else bool(_tracer(self).read(self))

    def __index__(self) -> int:
        return operator.index(_tracer(self).read(self))

    def __int__(self) -> int:
        return int(_tracer(self).read(self))

    def __float__(self) -> float:
        return float(_tracer(self).read(self))

    def __hash__(self) -> int:
        value = self.node.meta["value"]
        is_object = isinstance(value, (Tensor, list, dict, Unknown)) or value is None
        return id(self) if is_object else hash(_tracer(self).read(self))

    def __len__(self) -> int:
        value = self.node.meta["value"]
        if isinstance(value, Tensor):
            return operator.index(self.shape[0])
        if value is UNKNOWN:
            return _tracer(self).read(self)
        if isinstance(value, torch.Size):  # a branch on the rank of a tensor
            _tracer(self).check_length(self)
        return len(value)

    def __iter__(self) -> Iterator[Any]:
        value = self.node.meta["value"]
        if isinstance(value, dict):
            return iter(value)
        length = _unpacked_into(sys._getframe(1)) if value is UNKNOWN else len(self)
        return iter([self[i] for i in range(length or len(self))])

    def __contains__(self, item: object) -> bool:
        value = self.node.meta["value"]
        if value is UNKNOWN:
            return _tracer(self).read(self)
        if isinstance(value, dict):
            return item in value
        return any(bool(element == item) for element in self)

    def keys(self) -> Any:
        return self.node.meta["value"].keys()

    def values(self) -> list[Any]:
        return [self[key] for key in self.keys()]

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, self[key]) for key in self.keys()]

    def __setitem__(self, index: Any, item: Any) -> None:
        _tracer(self).create_proxy("call_function", operator.setitem, (self, index, item), {})


class Method:
    """Method `name` of the proxy `owner`; a call adds a `call_method` node to the graph and returns its proxy."""

    def __init__(self, owner: ValueProxy, name: str):
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = (self.owner, *args)
        return _tracer(self.owner).create_proxy("call_method", self.name, args, kwargs)


def has_proxy(*values: Any) -> bool:
    """Return whether one of `values`, or an element of a nested tuple, list or dict in them, is a ValueProxy."""
    for value in values:
        if type(value) is ValueProxy:
            return True
        if isinstance(value, dict) and has_proxy(*value.values()):
            return True
        if isinstance(value, (tuple, list)) and has_proxy(*value):
            return True
    return False


def _tracer(proxy: ValueProxy) -> Any:
    """Return the ValueTracer of a proxy, typed as Any, because the tracer's module imports this one."""
    return proxy.tracer


def _unpacked_into(frame: FrameType) -> int:
    """Return how many names the running statement of `frame` unpacks into (2 in `b, s = x.shape`), or 0."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else 0
    return 0


def _decided_for_any_draw(node: Any) -> bool | None:
    """Return the truth value of a node that compares a result of `torch.rand` with a constant, if any random number gives
    the same: False for `torch.rand(()) < 0.0` (layer drop of rate 0). Return None for any other node.
    """
    if node.target not in (operator.lt, operator.gt) or len(node.args) != 2:
        return None
    left, right = node.args if node.target is operator.lt else reversed(node.args)
    if getattr(left, "target", None) is torch.rand and isinstance(right, (int, float)):
        return False if right <= 0 else True if right >= 1 else None
    return None


def _in_place(name: str) -> Any:
    """Return the method of ValueProxy for the in-place operator `name`, e.g. "iadd": on a traced tensor `x += y` becomes a
    graph node, on a size or tuple it stays plain Python.
    """
    target = getattr(operator, name)

    def impl(self: ValueProxy, other: Any) -> Any:
        if not isinstance(self.node.meta["value"], (Tensor, Unknown)):
            return NotImplemented
        return _tracer(self).create_proxy("call_function", target, (self, other), {})

    return impl


for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(ValueProxy, f"__{_name}__", _in_place(_name))
