"""Evaluator of integer arithmetic over named numbers, without running code: `"n_embd // n_head"`.

A formula has integers, names, the operators + - * // % and parentheses; a comparison has two formulas with one of
== != <= < >= > between them. Python's own parser reads the text, and every other node of its tree is refused.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping

from slapo_zoo.errors import ScheduleError

MAX_TEXT, MAX_PARENTHESES, MAX_NUMBER = 200, 16, 2**53
_TEXT = re.compile(r"[a-z0-9_ =!<>+*/%()-]*", re.ASCII)
_NO_NUMBER = re.compile(r"\b[0-9]+[a-z_]")  # 0x10, 1_000 and 1or are Python's, not ours
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.LtE: operator.le,
    ast.Lt: operator.lt, ast.GtE: operator.ge, ast.Gt: operator.gt,
}  # fmt: skip


class Named(int):
    """Model size: an int with a name, `Named.of(64, "head_dim")`; a published schedule stores `name`, not the number."""

    name: str = ""

    @staticmethod
    def of(value: int, name: str) -> "Named":
        """Return `value` as an int that carries the name of its size, e.g. "head_dim"."""
        found = Named(value)
        found.name = name
        return found


def parse(text: str) -> ast.expr:
    """Return the syntax tree of a formula such as "n_embd // n_head"; ScheduleError for any other text."""
    node = _tree(text)
    _check(node, text)
    return node


def parse_comparison(text: str) -> ast.Compare:
    """Return the syntax tree of a comparison such as "tp <= num_heads"; ScheduleError for any other text."""
    node = _tree(text)
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or type(node.ops[0]) not in _COMPARISONS:  # fmt: skip
        raise _refused(text, "found no comparison of two formulas, such as `heads % tp == 0`")
    for side in (node.left, *node.comparators):
        _check(side, text)
    return node


def evaluate(text: str, numbers: Mapping[str, int]) -> int:
    """Return the value of a formula whose names stand for `numbers`; ScheduleError for an unknown name, division by 0."""
    return _value(parse(text), text, numbers)


def holds(text: str, numbers: Mapping[str, int]) -> bool:
    """Return whether a comparison such as "tp <= num_heads" is true; `numbers` are the values of its names."""
    node = parse_comparison(text)
    sides = (_value(side, text, numbers) for side in (node.left, *node.comparators))
    return _COMPARISONS[type(node.ops[0])](*sides)


def names_in(node: ast.expr) -> set[str]:
    """Return the names of numbers, e.g. "n_embd", in the syntax tree `node` of a formula."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _tree(text: str) -> ast.expr:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise _refused(text, f"expected a text of at most {MAX_TEXT} characters")
    if not _TEXT.fullmatch(text) or _NO_NUMBER.search(text):
        raise _refused(text, "found a character that arithmetic does not use")
    if text.count("(") > MAX_PARENTHESES:
        raise _refused(text, f"found more than {MAX_PARENTHESES} parentheses")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _refused(text, f"the text cannot be read: {error.msg}") from None


def _check(node: ast.expr, text: str) -> None:
    """Raise ScheduleError if the syntax tree of the formula `text` has other nodes than numbers, names and + - * // %."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        _check(node.left, text)
        _check(node.right, text)
    elif isinstance(node, ast.Constant):
        if type(node.value) is not int or node.value > MAX_NUMBER:
            raise _refused(text, f"found {node.value!r:.20}, expected an integer up to 2**53")
    elif not isinstance(node, ast.Name):
        raise _refused(text, f"found {ast.unparse(node)!r:.80}, expected a number or a name")


def _value(node: ast.expr, text: str, numbers: Mapping[str, int]) -> int:
    if isinstance(node, ast.Name):
        found = numbers.get(node.id)
        if type(found) is not int:
            known = ", ".join(sorted(numbers)) or "none"
            problem = f"{node.id!r} is {'no integer' if node.id in numbers else 'not known'} here"
            hint = f"use one of the known numbers: {known}"
            raise ScheduleError("formula", repr(text), problem, hint)
        return found
    if isinstance(node, ast.Constant):
        return node.value  # pyright: ignore[reportReturnType]
    assert isinstance(node, ast.BinOp)  # noqa: S101 - it was checked
    left, right = (_value(side, text, numbers) for side in (node.left, node.right))
    try:
        value = _ARITHMETIC[type(node.op)](left, right)
    except ZeroDivisionError:
        raise _no_value(text, numbers, f"a division by 0: {ast.unparse(node.right)} is 0") from None
    if abs(value) > MAX_NUMBER:
        raise _no_value(text, numbers, f"{value} is beyond 2**53")
    return value


def _no_value(text: str, numbers: Mapping[str, int], problem: str) -> ScheduleError:
    values = (f"{n}={numbers[n]}" for n in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)))
    hint = f"correct this formula of the schedule, or the config and mesh ({', '.join(values)})"
    return ScheduleError("formula", repr(text), problem, hint)


def _refused(text: str, problem: str) -> ScheduleError:
    hint = "write a short formula of integers and names with + - * // % and parentheses"
    return ScheduleError("formula", f"{text!r:.80}", problem, hint)
