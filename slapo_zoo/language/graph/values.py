"""Helpers of the tracer: values behind proxies, the source line that runs, and dependence on tensor data."""

import operator
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from slapo_zoo.language.graph.proxy import ValueProxy

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
