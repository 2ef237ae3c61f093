"""Symbol: a tunable name with its candidate values, and the one at which it is fixed."""

from collections.abc import Iterable
from typing import Any

from slapo_zoo.errors import SlapoError


class SpaceError(SlapoError, ValueError):
    """Error of an invalid tuning space, symbol or configuration."""


class Symbol:
    """One tunable symbol of a space and its candidate values.

    Comparisons with a number are False until the symbol is fixed, so that a function that builds a
    space may test `if batch_size >= 64:` early.

    Args:
        name: name of the symbol.
        vals: candidate values, ordered so that neighbours are similar.
    """

    def __init__(self, name: str, vals: Iterable[Any]):
        self.name, self.vals, self.fixed_idx = name, list(vals), -1

    @property
    def value(self) -> Any:
        """Return the value at which the symbol is fixed; SpaceError (a ValueError) before."""
        if not self.is_fixed():
            problem = f"it has not been fixed at one of {self.vals}"
            raise SpaceError("Symbol", self.name, problem, "call fix_at(index) first")
        return self.vals[self.fixed_idx]

    def is_fixed(self) -> bool:
        """Return whether `fix_at` has chosen a candidate."""
        return self.fixed_idx != -1

    def fix_at(self, idx: int) -> None:
        """Fix the symbol at the candidate with index `idx`; SpaceError if there is none."""
        if not 0 <= idx < len(self.vals):
            problem = f"found index {idx}, it has {len(self.vals)} values"
            raise SpaceError(
                "Symbol", self.name, problem, f"indices from 0 to {len(self.vals) - 1}"
            )
        self.fixed_idx = idx

    def add(self, val: Any) -> None:
        """Append a candidate value, unless the symbol has it already."""
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
