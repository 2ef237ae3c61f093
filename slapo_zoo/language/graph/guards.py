"""Runtime checks in a traced graph: sizes and arguments on which the trace branched must still be the same.

A trace follows one path through Python's `if`s. Each branch that read a size, a type or an argument leaves a
check in the graph, so that a call which would branch otherwise raises an error. Dead-code elimination keeps
the checks, as it keeps writes and random draws.
"""

import re
from typing import Any

from torch import fx
from torch.fx.node import has_side_effect

from slapo_zoo.errors import ScheduleError


@has_side_effect
def expect(value: Any, expected: Any, where: str, read: str) -> None:
    """Raise ScheduleError unless `value` equals its value during the trace.

    Args:
        value: value of the expression in this call.
        expected: value of the expression during the trace.
        where: path of the traced module, for the error.
        read: what was read, e.g. `self.training` or a node's name and place in the code, for the error.
    """
    if isinstance(expected, bool) or expected is None:
        same = value is expected
    else:
        same = value == expected
    if not same:
        problem = f"{read} was {expected!r} during the trace, this call has {_shown(value)}"
        hint = "trace again in the mode (train or eval) of this call, with its arguments as example inputs"
        raise ScheduleError(where, "trace", problem, hint)


@has_side_effect
def expect_given(value: Any, where: str, name: str) -> None:
    """Raise ScheduleError when `value`, which the call passes for the argument `name`, is None: the trace had a tensor.
    `where` is the path of the traced module, for the error.
    """
    if value is None:
        problem = f"{name!r} was given during the trace, this call has None"
        hint = f"pass {name!r}, or trace with example_inputs in which it is None"
        raise ScheduleError(where, "trace", problem, hint)


@has_side_effect
def expect_no_others(others: dict[str, Any], where: str) -> None:
    """Raise ScheduleError when the call passes a keyword argument that the example call did not.

    Args:
        others: the call's `**kwargs`.
        where: path of the traced module, for the error.
    """
    unknown = sorted(name for name, value in others.items() if value is not None)
    if unknown:
        problem = f"this call has the keyword arguments {unknown}, which the example call lacked"
        hint = "leave them out, or trace with example_inputs that have them"
        raise ScheduleError(where, "trace", problem, hint)


def by_mode(training: bool, in_training: Any, in_eval: Any) -> Any:
    """Return `in_training`, e.g. a dropout's probability, if `training` (read when the graph runs), else `in_eval`."""
    return in_training if training else in_eval


GUARDS = {expect, expect_given, expect_no_others}
WRITING_OPERATORS = {"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor"}
WRITING_OPERATORS |= {"imatmul"}


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay although its result is unused: a check, a write, a random draw, a module call."""
    if node.op in ("placeholder", "output", "call_module"):
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function" or node.target in GUARDS:
        return node.op == "call_function"
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        return name in WRITING_OPERATORS
    random = re.match(r"rand|dropout|bernoulli|normal|multinomial", name)
    return bool(random) or name.endswith("_")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
