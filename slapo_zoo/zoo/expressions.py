"""Parser and evaluator of integer arithmetic over named numbers, without running code: `"n_embd // n_head"`.

comparison = sum ("==" | "!=" | "<=" | "<" | ">=" | ">") sum
sum        = product (("+" | "-") product)*
product    = operand (("*" | "//" | "%") operand)*
operand    = NUMBER | NAME | "(" sum ")"
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slapo_zoo.errors import ScheduleError

MAX_TEXT, MAX_NESTING, MAX_NUMBER = 200, 16, 2**53
_TOKEN = re.compile(r" *([0-9]+|[a-z][a-z0-9_]*|//|[=!<>]=|[<>+*%()-])", re.ASCII)
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le,
    "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """Node `left op right` of a syntax tree; leaves are integers and names."""

    op: str
    left: "Node"
    right: "Node"


Node = int | str | Operation


class Named(int):
    """An int that carries the name it has in the config, so that a schedule can be written for other sizes."""

    name: str = ""

    @staticmethod
    def of(value: int, name: str) -> "Named":
        """Return `value` as an int that carries its name."""
        found = Named(value)
        found.name = name
        return found


def parse(text: str) -> Node:
    """Parse integer arithmetic over names into a tree; ScheduleError for anything else."""
    return _Parser(text).whole(comparison=False)


def parse_comparison(text: str) -> Operation:
    """Parse a comparison of two sums into a tree; ScheduleError for anything else."""
    found = _Parser(text).whole(comparison=True)
    assert isinstance(found, Operation)  # noqa: S101 - the grammar has no other
    return found


def evaluate(text: str, numbers: Mapping[str, int]) -> int:
    """Return the value of an arithmetic text over `numbers`; ScheduleError for an unknown name or a division by 0."""
    return _value(parse(text), text, numbers)


def holds(text: str, numbers: Mapping[str, int]) -> bool:
    """Return whether the comparison in a text is true for the given numbers."""
    node = parse_comparison(text)
    sides = (_value(side, text, numbers) for side in (node.left, node.right))
    return _COMPARISONS[node.op](*sides)


def names_in(node: Node) -> set[str]:
    """Return the names that a syntax tree contains."""
    if isinstance(node, Operation):
        return names_in(node.left) | names_in(node.right)
    return {node} if isinstance(node, str) else set()


def _value(node: Node, text: str, numbers: Mapping[str, int]) -> int:
    if isinstance(node, str):
        found = numbers.get(node)
        if type(found) is not int:
            known = ", ".join(sorted(numbers)) or "none"
            problem = f"{node!r} is {'no integer' if node in numbers else 'not known'} here"
            raise ScheduleError("arithmetic", repr(text), problem, f"known numbers: {known}")
        return found
    if isinstance(node, int):
        return node
    left, right = (_value(side, text, numbers) for side in (node.left, node.right))
    if node.op in ("//", "%") and right == 0:
        raise ScheduleError(
            "arithmetic", repr(text), "a division by 0", "check the numbers of this expression"
        )
    value = _ARITHMETIC[node.op](left, right)
    if abs(value) > MAX_NUMBER:
        raise ScheduleError(
            "arithmetic",
            repr(text),
            "a number beyond 2**53",
            "check the numbers of this expression",
        )
    return value


class _Parser:
    """Recursive-descent parser with limits on length and nesting."""

    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise self._fail(f"expected a text of at most {MAX_TEXT} characters")
        self.tokens, position = [], 0
        while match := _TOKEN.match(text, position):
            self.tokens.append(match[1])
            position = match.end()
        if text[position:].strip(" "):
            raise self._fail(f"found {text[position:].strip()[:1]!r}, which is no arithmetic")

    def whole(self, comparison: bool) -> Node:
        node = self._sum()
        if comparison:
            op = self._next()
            if op not in _COMPARISONS:
                raise self._fail(f"found {op or 'its end'!r}, expected a comparison")
            node = Operation(op, node, self._sum())
        if self.at < len(self.tokens):
            raise self._fail(f"found {self.tokens[self.at]!r}, expected its end")
        return node

    def _sum(self) -> Node:
        return self._chain(("+", "-"), lambda: self._chain(("*", "//", "%"), self._operand))

    def _chain(self, ops: tuple[str, ...], part: Callable[[], Node]) -> Node:
        node = part()
        while self.at < len(self.tokens) and self.tokens[self.at] in ops:
            op = self._next()
            node = Operation(op, node, part())
        return node

    def _operand(self) -> Node:
        word = self._next()
        if word == "(":
            self.depth += 1
            if self.depth > MAX_NESTING:
                raise self._fail(f"more than {MAX_NESTING} nested parentheses")
            node = self._sum()
            if self._next() != ")":
                raise self._fail("a parenthesis is not closed")
            self.depth -= 1
            return node
        if word[:1].isdigit():
            if len(word) > 16 or int(word) > MAX_NUMBER:
                raise self._fail("a number beyond 2**53")
            return int(word)
        if word[:1].isalpha():
            return word
        raise self._fail(f"found {word or 'its end'!r}, expected a number or a name")

    def _next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""

    def _fail(self, problem: str) -> ScheduleError:
        hint = "use integers and names with + - * // % and parentheses"
        return ScheduleError("arithmetic", f"{self.text!r:.80}", problem, hint)
