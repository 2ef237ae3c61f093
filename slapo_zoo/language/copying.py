"""An independent copy of a scheduled module: what its directives put into it works on the copy.

`copy.deepcopy` takes functions as they are. A directive's forward or hook is a function that holds its
module, so a plain copy would go on computing with the weights of the original.
"""

import copy
import functools
from collections.abc import Iterator
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from slapo_zoo.dispatch.kernel_registry import HOOKS

OURS = "slapo_zoo"


def independent_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Make a deep copy whose forwards and hooks are bound to the copy.

    Args:
        module: whose class calls this in `__deepcopy__`.
        memo: of `copy.deepcopy`; what it names already is shared (process groups).
    """
    new = module.__class__.__new__(module.__class__)
    memo[id(module)] = new
    new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    for part in chain([module], memo[id(memo)]):  # modules that stand in for others hold some, too
        own = memo.get(id(part))
        if own is None or own is part or not isinstance(part, nn.Module):
            continue
        if "forward" in part.__dict__:
            own.__dict__["forward"] = rebound(part.__dict__["forward"], memo)
        for name in HOOKS:
            for key, hook in getattr(part, name).items():
                getattr(own, name)[key] = rebound(hook, memo)
    _keep_notes(module, memo)
    return new


def rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a function of ours holds; functions of others stay as they are."""
    if isinstance(value, MethodType):  # in a memo of `copy.deepcopy` its function is the original's
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


def _keep_notes(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy the notes of `annotate` to the copies of parameters, which lack them."""
    for parameter, name, note in _notes(module):
        setattr(memo[id(parameter)], name, copy.deepcopy(note, memo))


def _notes(module: nn.Module) -> Iterator[tuple[nn.Parameter, str, Any]]:
    for parameter in module.parameters():
        for name, note in parameter.__dict__.items():
            if not name.startswith("_"):
                yield parameter, name, note
