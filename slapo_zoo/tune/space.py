"""Tuning space: symbols (tunable variables) with candidate values that may depend on earlier symbols.

A symbol has a list of candidates, or a function of earlier symbols that returns them; it may have a
condition, and constraints exclude configurations. The older form is a function `update(arguments, space)`
that is called again after each symbol is fixed and creates the symbols anew.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

from slapo_zoo.errors import SlapoError


class SpaceError(SlapoError, ValueError):
    """Error of an invalid tuning space, symbol or configuration."""


class Symbol:
    """Tunable variable of a space (`batch_size`, `tp`, ...) and its candidate values.

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
        """Return the value at which the symbol is fixed; raise SpaceError (a ValueError) if it is not fixed yet."""
        if not self.is_fixed():
            problem = f"the symbol is not fixed yet at one of {self.vals}"
            raise SpaceError("Symbol", self.name, problem, "call fix_at(index) first")
        return self.vals[self.fixed_idx]

    def is_fixed(self) -> bool:
        """Return whether the symbol has a value: `fix_at` has chosen one of its candidates."""
        return self.fixed_idx != -1

    def fix_at(self, idx: int) -> None:
        """Fix the symbol at the candidate with index `idx`; raise SpaceError for an index out of range."""
        if not 0 <= idx < len(self.vals):
            problem = f"found index {idx}, the symbol has {len(self.vals)} values"
            hint = f"pass an index from 0 to {len(self.vals) - 1}"
            raise SpaceError("Symbol", self.name, problem, hint)
        self.fixed_idx = idx

    def add(self, val: Any) -> None:
        """Append `val` to the candidate values of the symbol, unless `val` is one of them already."""
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


Point = dict[str, Any]
Update = Callable[[Any, "Space"], Any]
MOST_POINTS = 200_000


class Space:
    """Tuning space: symbols (tunable variables) with candidate values. `points` yields the configurations: it fixes one
    symbol after the other, in order of creation, so the candidates of a symbol may depend on earlier ones.
    """

    def __init__(self) -> None:
        self.space: dict[str, Symbol] = {}
        self.fixed_idx = -1
        self._candidates: dict[str, Callable[..., Iterable[Any]]] = {}
        self._conditions: dict[str, Callable[..., bool]] = {}
        self._constraints: list[Callable[..., bool]] = []
        self._absent: set[str] = set()

    def create_symbol(
        self, name: str, vals: Iterable[Any] | Callable[..., Iterable[Any]],
        when: Callable[..., bool] | None = None,
    ) -> Symbol:  # fmt: skip
        """Create a symbol, or give an existing one new candidates unless it is fixed; return the symbol.

        Args:
            name: name of the symbol.
            vals: candidate values, or a function of earlier symbols (parameters have their names) that returns the values.
            when: function of earlier symbols; configurations for which the function returns False lack this symbol.
        """
        known = self.space.get(name)
        if known is not None and known.is_fixed():
            return known
        for rules, rule in ((self._candidates, vals), (self._conditions, when)):
            rules.pop(name, None)
            if callable(rule):
                _check_names(name, rule, [n for n in self.space if n != name])
                rules[name] = rule  # pyright: ignore[reportArgumentType]
        self.space[name] = Symbol(name, () if callable(vals) else vals)
        self._settle()
        return self.space[name]

    def constrain(self, rule: Callable[..., bool]) -> None:
        """Exclude configurations for which `rule`, a function whose parameters are names of symbols, returns False:
        `space.constrain(lambda tp, pp: tp * pp <= 8)`.
        """
        _check_names("constrain", rule, list(self.space))
        self._constraints.append(rule)

    def next(self) -> Symbol | None:
        """Return the next symbol to fix, in the order of creation; None after the last."""
        names = list(self.space)
        while self.fixed_idx + 1 < len(names):
            self.fixed_idx += 1
            if names[self.fixed_idx] not in self._absent:
                return self.space[names[self.fixed_idx]]
        return None

    def reset(self) -> None:
        """Clear the value of every symbol of the space, so that all symbols can be fixed anew."""
        self.fixed_idx = -1
        for symbol in self.space.values():
            symbol.fixed_idx = -1
        self._settle()

    def to_dict(self) -> Point:
        """Return the configuration as {symbol: value}; raise SpaceError while a symbol is not fixed."""
        return {n: symbol.value for n, symbol in self.space.items() if n not in self._absent}

    def clone(self) -> "Space":
        """Return a copy of the space, whose symbols can be fixed independently of the original's."""
        other = Space()
        for name, symbol in self.space.items():
            other.space[name] = Symbol(name, symbol.vals)
            other.space[name].fixed_idx = symbol.fixed_idx
        other.fixed_idx, other._absent = self.fixed_idx, set(self._absent)
        other._candidates, other._conditions = dict(self._candidates), dict(self._conditions)
        other._constraints = list(self._constraints)
        return other

    @staticmethod
    def cfg_dict_to_str(cfg_dict: Mapping[str, Any]) -> str:
        """Format a configuration, symbol --> value, in one line: `(batch_size: 8, ckpt_ratio: 0.5)`."""
        return "(" + ", ".join(f"{name}: {value}" for name, value in cfg_dict.items()) + ")"

    def points(
        self, training_script_args: Any = None, update_space_fn: Update | None = None
    ) -> Iterator[Point]:
        """Yield every configuration, {symbol: value}, in the order of the symbols and their candidates.

        Args:
            training_script_args: first argument of `update_space_fn`, e.g. parsed options of a training script.
            update_space_fn: function (training_script_args, space), called before the first and after each symbol is
                fixed, which creates further symbols of the space; None for a space that is complete.
        """
        space = self.clone()
        space.reset()
        yield from space._walk(training_script_args, update_space_fn)

    def all_points(self, *arguments: Any) -> list[Point]:
        """Return the list of all configurations that `points` yields for its own `arguments`: none, or
        `training_script_args` and `update_space_fn`. Raise SpaceError for no configuration or over 200,000.
        """
        found: list[Point] = []
        for point in self.points(*arguments):
            found.append(point)
            if len(found) > MOST_POINTS:
                problem = f"the space has more than {MOST_POINTS} configurations"
                hint = "give a symbol fewer values, or add a constraint"
                raise SpaceError("Space", self, problem, hint)
        if not found:
            problem = "no configuration is left: constraints exclude all, or a symbol has no value"
            raise SpaceError("Space", self, problem, "remove a constraint, or give symbols values")
        return found

    def log_space(self, training_script_args: Any, update_space_fn: Update) -> None:
        """Log every configuration, {symbol: value}, and their number. `update_space_fn(training_script_args, space)`,
        called at the start and after each symbol (tunable variable) is fixed at a value, may add symbols.
        """
        from slapo_zoo.parallel.rng.seeds import get_logger

        say, count = get_logger("slapo_zoo").info, 0
        for count, point in enumerate(self.points(training_script_args, update_space_fn), 1):  # noqa: B007
            say("\t%s", self.cfg_dict_to_str(point))
        say("Space size: %d", count)

    def _walk(self, arguments: Any, update: Update | None) -> Iterator[Point]:
        if update is not None:
            update(arguments, self)
        self._settle()
        if not self._allowed():
            return
        symbol = self.next()
        if symbol is None:
            yield self.to_dict()
            return
        for idx in range(len(symbol.vals)):
            branch = self.clone()
            branch.space[symbol.name].fix_at(idx)
            yield from branch._walk(arguments, update)

    def _settle(self) -> None:
        """Update, from the symbols that are fixed, the `vals` of others and `_absent`: those whose condition fails."""
        fixed = {n: symbol.value for n, symbol in self.space.items() if symbol.is_fixed()}
        self._absent = {n for n, rule in self._conditions.items()
                        if _applies(rule, fixed, self._absent) and not _call(rule, fixed)}  # fmt: skip
        for name, rule in self._candidates.items():
            symbol = self.space[name]
            if not symbol.is_fixed() and _applies(rule, fixed, self._absent):
                symbol.vals = list(_call(rule, fixed))

    def _allowed(self) -> bool:
        fixed = {n: symbol.value for n, symbol in self.space.items() if symbol.is_fixed()}
        known = [rule for rule in self._constraints if set(signature(rule).parameters) <= set(fixed)]  # fmt: skip
        return all(_call(rule, fixed) for rule in known)

    def __repr__(self) -> str:
        return "Space(" + ", ".join(map(repr, self.space.values())) + ")"


def _check_names(what: str, rule: Callable[..., Any], known: list[str]) -> None:
    if unknown := [name for name in signature(rule).parameters if name not in known]:
        problem = f"the function takes {unknown[0]!r}, but the symbols created so far are {known}"
        raise SpaceError("Space", what, problem, "create this symbol first, or correct the name")


def _applies(rule: Callable[..., Any], fixed: Mapping[str, Any], absent: set[str]) -> bool:
    return all(name in fixed or name in absent for name in signature(rule).parameters)


def _call(rule: Callable[..., Any], fixed: Mapping[str, Any]) -> Any:
    return rule(**{name: fixed.get(name) for name in signature(rule).parameters})
