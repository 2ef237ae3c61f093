"""Grid: the configurations of a tuning space as vectors, for search strategies and their models of speed and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slapo_zoo.tune.space import Point

# Symbols whose larger values take more memory (+1) or less (-1), whatever the rest is.
MEMORY = {
    "batch_size": 1, "micro_batch_size": 1, "rows": 1, "bs": 1, "ckpt_ratio": -1, "checkpoint_ratio": -1,
}  # fmt: skip


class Grid:
    """All configurations of a tuning space, each with a number (its index in `points`).

    A symbol is a variable of the space, e.g. `batch_size`.

    Args:
        points: the configurations, each a dict symbol --> value.
    """

    def __init__(self, points: Sequence[Point]):
        self.points = list(points)
        self.names = list(dict.fromkeys(name for point in points for name in point))
        self.values = {name: self._ordered(name) for name in self.names}
        self.number = {_key(point): i for i, point in enumerate(self.points)}
        place = {name: {_hash(v): i for i, v in enumerate(vs)} for name, vs in self.values.items()}
        self.index = np.array(
            [[place[n].get(_hash(p.get(n)), -1) for n in self.names] for p in self.points],
            dtype=int,
        ).reshape(len(self.points), len(self.names))

    def _ordered(self, name: str) -> list[Any]:
        values = list({_hash(p[name]): p[name] for p in self.points if name in p}.values())
        return sorted(values) if all(is_number(v) for v in values) else values

    def find(self, point: Mapping[str, Any]) -> int | None:
        """Return the number of a configuration (its index in `points`), or None if the grid does not contain it."""
        return self.number.get(_key(point))

    def coordinates(self, without: Sequence[str] = ()) -> np.ndarray:
        """Return the configurations as an array [points, columns] of numbers in 0..1, `without` some symbols.

        A symbol whose values are numbers has one column, scaled; any other has a 0/1 column per value but the first.
        """
        columns = []
        for j, name in enumerate(self.names):
            values = self.values[name]
            if name in without:
                continue
            if len(values) > 1 and all(is_number(v) for v in values):
                columns.append(_scaled(np.array(values, dtype=float))[self.index[:, j]])
                continue
            columns += [(self.index[:, j] == i).astype(float) for i in range(1, len(values))]
        return np.stack(columns, 1) if columns else np.zeros((len(self.points), 1))

    def takes_more(self, small: int) -> np.ndarray:
        """Return a mask [points], True for each configuration that surely takes at least the memory of configuration
        `small`: its batch size is not smaller, its `ckpt_ratio` (share of recomputed blocks) not larger, the rest
        equal.
        """
        return self._against(small, 1)

    def takes_less(self, large: int) -> np.ndarray:
        """Return a mask [points]: True for a configuration that surely takes as much memory as points[large] or less:
        its batch size is not larger, its share of recomputed blocks not smaller, and all other symbols are equal.
        """
        return self._against(large, -1)

    def _against(self, number: int, sign: int) -> np.ndarray:
        mask = np.ones(len(self.points), dtype=bool)
        for j, name in enumerate(self.names):
            direction = MEMORY.get(name, 0) if all(map(is_number, self.values[name])) else 0
            more = (self.index[:, j] - self.index[number, j]) * sign * direction
            mask &= more >= 0 if direction else self.index[:, j] == self.index[number, j]
        return mask

    def corners(self, here: np.ndarray) -> list[int]:
        """Return the numbers of the few configurations to measure first, to learn which of all fit into memory.

        In the first one all symbols that matter for memory (batch size, recomputation) have the value that needs least,
        in each following one a single such symbol the value that needs most, in the last one all such symbols their
        middle value. The other symbols have the values of `here`: an array [symbols] of indices, each into its symbol's
        values.
        """
        axes = [j for j, n in enumerate(self.names) if MEMORY.get(n) and len(self.values[n]) > 1]
        low, high = np.array(here), np.array(here)
        for j in axes:
            ends = 0, len(self.values[self.names[j]]) - 1
            low[j], high[j] = ends if MEMORY[self.names[j]] > 0 else ends[::-1]
        wanted = [low] * bool(axes)
        for j in axes if len(axes) > 1 else ():
            wanted.append(np.array(low))
            wanted[-1][j] = high[j]
        wanted += [(low + high) // 2] * bool(axes)
        place = {tuple(row): i for i, row in enumerate(self.index.tolist())}
        return [place[tuple(row.tolist())] for row in wanted if tuple(row.tolist()) in place]

    def memory_terms(self) -> np.ndarray:
        """Return features [points, terms] whose weighted sum is fitted to the peak memory (in `strategies.fits`).

        The terms are 1, the rows of a batch relative to the most (the product of symbols such as `batch_size`), and
        these rows times each column of `coordinates` of the other symbols; if none counts rows, 1 and all columns.
        """
        counts = [n for n in self.names if MEMORY.get(n, 0) > 0 and all(map(is_number, self.values[n]))]  # fmt: skip
        columns, one = self.coordinates(counts), np.ones((len(self.points), 1))
        if not counts:
            return np.concatenate([one, columns], 1)
        rows = one[:, 0].copy()
        for name in counts:
            values = np.array(self.values[name], dtype=float)
            rows *= (values / values.max())[self.index[:, self.names.index(name)]]
        return np.concatenate([one, rows[:, None], rows[:, None] * columns], 1)

    def memory_parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays [points]: (rows of a batch relative to the most in the grid, 1 - share of recomputed blocks
        relative to the largest in the grid). They are 1 and 0 where the grid does not vary batch size or recomputation.
        """
        rows, kept = np.ones(len(self.points)), np.zeros(len(self.points))
        for name, direction in MEMORY.items():
            values = self.values.get(name, [])
            if len(values) < 2 or not all(map(is_number, values)):
                continue
            scale = np.array(values, dtype=float)[self.index[:, self.names.index(name)]]
            if direction > 0:
                rows *= scale / scale.max()
            else:
                kept += 1.0 - scale / max(scale.max(), 1e-12)
        return rows, kept

    def memory_rank(self) -> np.ndarray:
        """Return [points]: a rough estimate of the memory of each configuration, from 0 (least) to 1 (most).

        The estimate is a mean over the symbols that matter for memory (batch size, recomputation): a symbol counts 0
        at the value that needs least memory, 1 at the one that needs most, in between by the index of its value.
        """
        found = np.zeros(len(self.points))
        names = [n for n in self.names if MEMORY.get(n) and len(self.values[n]) > 1]
        for name in names:
            share = self.index[:, self.names.index(name)] / (len(self.values[name]) - 1)
            found += share if MEMORY[name] > 0 else 1.0 - share
        return found / max(len(names), 1)


def is_number(value: Any) -> bool:
    """Return whether `value`, a value of a tuned option, is an int or a float and so has an order; False for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(values: np.ndarray) -> np.ndarray:
    """Return values scaled to 0..1, logarithmically where the largest is at least 8 times the smallest."""
    low, high = values.min(), values.max()
    if low > 0 and high / low >= 8:
        values, low, high = np.log(values), np.log(low), np.log(high)
    return (values - low) / (high - low)


def _hash(value: Any) -> str:
    return repr(value)


def _key(point: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, _hash(value)) for name, value in point.items()))
