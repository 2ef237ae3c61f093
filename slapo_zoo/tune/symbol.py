"""A tunable symbol: a name, its candidate values, and which of them it is fixed at."""

from collections.abc import Iterable
from typing import Any

from slapo_zoo.errors import SlapoError


class SpaceError(SlapoError, ValueError):
    """A space, a symbol or a point of a space is not as it must be."""


class Symbol:
    """One knob of a search space and its candidate values.

    Comparisons with a number are False until the symbol is fixed, so that a function that builds a
    space may ask `if batch_size >= 64:` before it is known.

    Args:
        name: of the symbol.
        vals: candidate values, in an order in which neighbours are alike.
    """

    def __init__(self, name: str, vals: Iterable[Any]):
        self.name, self.vals, self.fixed_idx = name, list(vals), -1

    @property
    def value(self) -> Any:
        """The value it is fixed at; SpaceError (a ValueError) before."""
        if not self.is_fixed():
            problem = f"it has not been fixed at one of {self.vals}"
            raise SpaceError("Symbol", self.name, problem, "call fix_at(index) first")
        return self.vals[self.fixed_idx]

    def is_fixed(self) -> bool:
        """Return whether a value was chosen."""
        return self.fixed_idx != -1

    def fix_at(self, idx: int) -> None:
        """Choose the candidate at an index."""
        if not 0 <= idx < len(self.vals):
            problem = f"found index {idx}, it has {len(self.vals)} values"
            raise SpaceError(
                "Symbol", self.name, problem, f"indices from 0 to {len(self.vals) - 1}"
            )
        self.fixed_idx = idx

    def add(self, val: Any) -> None:
        """Add a candidate, unless it is one already."""
        if val not in self.vals:
            self.vals.append(val)

    def __len__(self) -> int:
        return len(self.vals)

    def __gt__(self, other: Any) -> bool:
        return self.is_fixed() and self.value > other

    def __ge__(self, other: Any) -> bool:
        return self.is_fixed() and self.value >= other

    def __lt__(self, other: Any) -> bool:
        return self.is_fixed() and self.value < other

    def __le__(self, other: Any) -> bool:
        return self.is_fixed() and self.value <= other

    def __repr__(self) -> str:
        return f"{self.name}: {f'{self.value} (fixed)' if self.is_fixed() else self.vals}"
