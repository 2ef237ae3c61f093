"""Deep copy of a module that a schedule has changed; the forwards and hooks that the schedule installed use the copy.

`copy.deepcopy` shares functions. A forward or hook that a directive (one change of the schedule) installs is a
closure over its module, so a plain deep copy would keep computing with the weights of the original.
"""

import copy
import functools
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.fx import GraphModule

from slapo_zoo.dispatch.kernel_registry import HOOKS

OURS = "slapo_zoo"


def independent_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a scheduled module; the copy's forwards and hooks use the copy's own weights.

    Args:
        module: the module; its class calls this function in `__deepcopy__`.
        memo: memo of `copy.deepcopy`: id of an object --> its copy. Objects that are in it already (process groups)
            are not copied; the copy shares them with the original.
    """
    new = plain_copy(module, memo)
    for part in chain([module], memo[id(memo)]):  # replaced modules have hooks too
        own = memo.get(id(part))
        if own is None or own is part or not isinstance(part, nn.Module):
            continue
        if "forward" in part.__dict__:
            own.__dict__["forward"] = rebound(part.__dict__["forward"], memo)
        for name in HOOKS:
            for key, hook in getattr(part, name).items():
                getattr(own, name)[key] = rebound(hook, memo)
    _copy_annotations(module, memo)
    return new


def plain_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module, whose forwards and hooks may still use the original; `memo` is that of the copy."""
    if isinstance(module, GraphModule):
        return GraphModule.__deepcopy__(module, memo)
    new = memo[id(module)] = module.__class__.__new__(module.__class__)
    new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return new


def rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `value`, a forward or hook of a module, that refers to the copies of the objects in `memo`.

    `memo` is the memo of `copy.deepcopy`: id of an object --> its copy. Bound methods are copied, and functions that
    slapo_zoo defines with a closure: their `self` or closure then holds the copies. Other functions are shared.
    """
    if isinstance(value, MethodType):  # copy.deepcopy would keep the original's function
        return MethodType(rebound(value.__func__, memo), rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        arguments = (rebound(each, memo) for each in value.args)
        named = {name: rebound(each, memo) for name, each in value.keywords.items()}
        return functools.partial(rebound(value.func, memo), *arguments, **named)
    if id(value) in memo:
        return memo[id(value)]
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    if value.__closure__ is None or not value.__globals__["__name__"].startswith(OURS):
        return value
    cells = tuple(CellType() for _ in value.__closure__)
    new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    new.__kwdefaults__, memo[id(value)] = value.__kwdefaults__, new
    for cell, old in zip(cells, value.__closure__, strict=True):
        cell.cell_contents = rebound(old.cell_contents, memo)
    new.__dict__.update({name: rebound(each, memo) for name, each in value.__dict__.items()})
    return new


def _copy_annotations(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy the attributes that `sch[path].annotate()` has set on parameters of `module` to the copied parameters.
    `memo` maps the id of a parameter to its copy.
    """
    for parameter in module.parameters():
        for name, note in parameter.__dict__.items():
            if not name.startswith("_"):
                setattr(memo[id(parameter)], name, copy.deepcopy(note, memo))
