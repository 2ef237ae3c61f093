"""Search strategies: which configuration of a grid to measure next, given the measurements so far.

A strategy can rebuild its state from the measurements, so a killed search resumes where it stopped. The default one
models memory use, and models throughput by a Gaussian process over a quadratic trend (step time changes smoothly with
batch size and recomputation; Rasmussen and Williams 2006, chapter 2; expected improvement: Jones et al. 1998).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slapo_zoo.errors import SlapoError
from slapo_zoo.tune.grid import MEMORY, Grid
from slapo_zoo.tune.outcome import OK, OUT_OF_MEMORY, Outcome

CAUTION = 2.0  # exponent of the probability to fit: a higher one avoids risk
KEPT = np.geomspace(0.1, 10.0, 25)  # memory of a row that recomputation may save, over its inputs
LENGTHS, NOISES = (0.25, 0.5, 1.0), (1e-3, 1e-2)
# prior variances of the trend, of scaled values
LINEAR, QUADRATIC, CONSTANT, SMOOTH = 1.0, 0.25, 4.0, 0.25


class Surrogate:
    """Gaussian process fitted to values such as log throughput; `mean` and standard `deviation` are arrays [points].

    Args:
        coordinates: [points, axes] in 0..1, a row for each configuration of the grid.
        measured: indices in `coordinates` of the configurations that were measured.
        values: measured value of each configuration in `measured`.
    """

    def __init__(self, coordinates: np.ndarray, measured: Sequence[int], values: Sequence[float]):
        y = np.asarray(values, dtype=float)
        self.scale = max(float(y.std()), 1e-3)
        self.middle = float(y.mean())
        z, rows = (y - self.middle) / self.scale, list(measured)
        best = None
        for length in LENGTHS:
            kernel = _kernel(coordinates, coordinates[rows], length)
            for noise in NOISES:
                inner = kernel[rows] + noise * np.eye(len(rows))
                root = np.linalg.cholesky(inner)
                weights = np.linalg.solve(root.T, np.linalg.solve(root, z))
                evidence = -0.5 * z @ weights - np.log(np.diag(root)).sum()
                if best is None or evidence > best[0]:
                    best = evidence, kernel, root, weights, length
        assert best is not None  # noqa: S101 - the loops ran
        _, kernel, root, weights, length = best
        self.mean = self.middle + self.scale * (kernel @ weights)
        half = np.linalg.solve(root, kernel.T)
        squares = 4.0 * ((coordinates - 0.5) ** 2).sum(1)
        prior = CONSTANT + LINEAR * squares + QUADRATIC * squares**2 + SMOOTH
        self.deviation = self.scale * np.sqrt(np.maximum(prior - (half**2).sum(0), 1e-12))

    def improvement(self, best: float) -> np.ndarray:
        """Return the expected improvement of each configuration, the mean of max(value - `best`, 0): an array [points]."""
        from math import erf, pi

        gain = self.mean - best
        z = gain / self.deviation
        cdf = 0.5 * (1.0 + np.array([erf(v / 2**0.5) for v in z]))
        return gain * cdf + self.deviation * np.exp(-0.5 * z**2) / (2.0 * pi) ** 0.5


def _kernel(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    ca, cb = a - 0.5, b - 0.5
    inner = ca @ cb.T
    distance = ((a[:, None] - b[None]) ** 2).sum(-1)
    smooth = np.exp(-0.5 * distance / length**2)
    return CONSTANT + LINEAR * 4.0 * inner + QUADRATIC * 16.0 * inner**2 + SMOOTH * smooth


def fits(
    grid: Grid, ran: Sequence[int], peaks: Sequence[float], failed: Sequence[int]
) -> np.ndarray:
    """Return an array [points]: per configuration of the grid, the squared probability that it fits into memory; the
    square makes a search avoid risk. All are 1 until a configuration has failed.

    If three or more configurations fit and all their peaks are known, a linear model of memory (`Grid.memory_terms`) is
    fitted to the peaks; the limit lies between the highest peak and the lowest estimate of a failure. Otherwise the
    probability follows from formulas in rows and recomputation that agree with the outcomes (`_by_laws`).

    Args:
        grid: all configurations of the search.
        ran: numbers of configurations that fit (a number is an index in `grid.points`).
        peaks: peak bytes of each configuration in `ran`; 0 where unknown.
        failed: numbers of configurations that ran out of memory.
    """
    if not failed:
        return np.ones(len(grid.points))
    surely, never = (np.zeros(len(grid.points), dtype=bool) for _ in range(2))
    for i in ran:
        surely |= grid.takes_less(i)
    for i in failed:
        never |= grid.takes_more(i)
    chance = _by_laws(grid, ran, failed)
    if len(ran) >= 3 and all(peaks):
        chance = _by_peaks(grid.memory_terms(), list(ran), peaks, list(failed), chance)
    chance[surely], chance[never] = 1.0, 0.0
    return chance**CAUTION


def _by_laws(grid: Grid, ran: Sequence[int], failed: Sequence[int]) -> np.ndarray:
    """Return the probability [points] that each configuration fits, averaged over all memory laws that agree with the
    numbers of configurations that fit (`ran`) and did not (`failed`); 0.5 if no law agrees.

    A law is: memory = rows * (1 + kept * share that is not recomputed), up to an unknown limit; `kept` is 0.1 to 10.
    """
    rows, kept = grid.memory_parts()
    memory = rows[None] * (1.0 + KEPT[:, None] * kept[None])  # shape [laws, points]
    low = memory[:, list(ran)].max(1) if len(ran) else np.zeros(len(KEPT))
    high = memory[:, list(failed)].min(1)
    agree = np.maximum(high - low, 0.0) / high  # share of limits that agree
    if not agree.any():
        return np.full(len(rows), 0.5)
    gap = np.maximum(high - low, 1e-12)[:, None]
    fits = np.clip((high[:, None] - memory) / gap, 0.0, 1.0)
    return (agree[:, None] * fits).sum(0) / agree.sum()


def _by_peaks(
    x: np.ndarray, ran: list[int], peaks: Sequence[float], failed: list[int], chance: np.ndarray
) -> np.ndarray:
    y = np.asarray(peaks, dtype=float)
    inner = x[ran].T @ x[ran] + 1e-6 * np.eye(x.shape[1])
    memory = x @ np.linalg.solve(inner, x[ran].T @ (y / y.max()))
    low, high = memory[ran].max(), memory[failed].min()
    if high <= low:  # the estimate contradicts the outcomes
        return chance
    return np.clip((high - memory) / (high - low), 0.0, 1.0)


Known = Mapping[int, Outcome]
WORTH = 0.0005  # expected relative improvement below which no other measurement is worth its time
ENOUGH = 2  # configurations that ran, before the surrogate is used
FEWEST = 17  # measurements before the search may stop by WORTH
MORE_CARE = 0.25  # added to CAUTION per out-of-memory outcome in a row
# prior guesses of the gain of a configuration that uses all memory
MORE_MEMORY = (0.02, 0.05, 0.1, 0.2, 0.3)


# Function (known outcomes in the order of measurement, numbers that are left) --> number of the configuration to
# measure next, or None if no other is worth measuring.
Strategy = Callable[[Known, Sequence[int]], int | None]


def exhaustive(grid: Grid, **options: Any) -> Strategy:
    """Return the search strategy that measures all configurations of the grid in order; `options` are ignored."""
    return lambda known, left: left[0] if left else None


def shuffled(grid: Grid, seed: int = 0, **options: Any) -> Strategy:
    """Return the search strategy that measures all configurations in random order (`seed`); `options` are ignored."""
    order = list(range(len(grid.points)))
    random.Random(seed).shuffle(order)  # noqa: S311 - no secret
    return lambda known, left: next((i for i in order if i in set(left)), None)


class Model:
    """Search strategy by Bayesian optimization: models that are fitted to the measured throughput and memory pick the
    configuration of largest expected improvement.

    Args:
        grid: all configurations of the search.
        start: number of the first configuration to measure.
        prior: relative throughput of every configuration as the planner expects it, or None.
        options: ignored; arguments of other strategies.
    """

    def __init__(
        self, grid: Grid, start: int = 0, prior: Sequence[float] | None = None, **options: Any
    ):
        self.grid, self.start = grid, start
        self.coordinates = grid.coordinates()
        self.priors = [gain * grid.memory_rank() for gain in MORE_MEMORY]
        if prior is not None:
            self.priors = [np.log(np.maximum(np.asarray(prior, float), 1e-12))]

    def __call__(self, known: Known, left: Sequence[int]) -> int | None:
        """Return the number of the configuration to measure next, one of `left` (those not measured yet): first
        `self.start`, then a few that show memory use, then that of the largest expected gain over the best throughput.
        None if none is left, or after 17 measurements if that gain is below 0.05 %. `known` has outcomes by number.
        """
        if not left:
            return None
        if not known:
            return self.start if self.start in left else left[0]
        ran = [i for i, outcome in known.items() if outcome.is_measured]
        if not ran:
            corners = self.grid.corners(self.grid.index[self.start])[:1]
            return corners[0] if set(corners) & set(left) else easiest(self.grid, known, left)
        if len(ran) < ENOUGH:
            return self._spread(known, left)
        measured = all(known[i].peak_memory for i in ran)
        if measured and (unseen := self._unseen(ran, left)) is not None:
            return unseen
        free = np.asarray(left)
        gain = self._gain(known, ran)[free]
        chosen = int(gain.argmax())
        return int(free[chosen]) if gain[chosen] > WORTH or len(known) < FEWEST else None

    def _spread(self, known: Known, left: Sequence[int]) -> int:
        """Return the number of the configuration to measure next, while few are measured.

        The configuration is an extreme of memory use (`Grid.corners`) that may fit, else the farthest from those measured.
        `known` has the outcomes by configuration number, `left` the numbers not measured yet.
        """
        corners = self.grid.corners(self.grid.index[self.start])
        ran = [i for i, outcome in known.items() if outcome.is_measured]
        silent = [i for i in ran if not known[i].peak_memory]
        # a corner in one of these surely fits, and teaches nothing
        sure = [self.grid.takes_less(i) for i in silent]
        if found := [i for i in corners if i in set(left) and not any(mask[i] for mask in sure)]:
            return found[0]
        free, seen = np.array(left), list(known)
        x = self.coordinates
        distance = ((x[free][:, None] - x[seen][None]) ** 2).sum(-1).min(1)
        return int(free[distance.argmax()])

    def _unseen(self, ran: list[int], left: Sequence[int]) -> int | None:
        """Return the number of a configuration in `left` (not measured yet) that shows how much memory a symbol takes,
        or None. The symbol is one of `grid.MEMORY` (batch size, recomputation) that has had a single value in all of
        `ran` (numbers that fit); the others of these have the value of least memory, all further symbols that of
        configuration `self.start`.
        """
        corners = self.grid.corners(self.grid.index[self.start])[:1]
        for j, name in enumerate(self.grid.names) if corners else ():
            if not MEMORY.get(name) or len(set(self.grid.index[ran, j])) > 1:
                continue
            low = np.delete(self.grid.index[corners[0]], j)
            row = [i for i in left if (np.delete(self.grid.index[i], j) == low).all()]
            if row:
                return sorted(row, key=lambda i: self.grid.index[i, j])[len(row) // 2]
        return None

    def _gain(self, known: Known, ran: list[int]) -> np.ndarray:
        """Return an array [points]: the expected gain in log throughput over the best so far, a mean over prior guesses
        (the planner's forecast, or 2 to 30 % from use of all memory), weighted by the chance that a configuration fits
        into memory. `ran` has the numbers of configurations that ran, `known` maps each measured number to its outcome.
        """
        values = np.log([known[i].throughput for i in ran])
        gain = np.zeros(len(self.grid.points))
        for prior in self.priors:
            model = Surrogate(self.coordinates, ran, list(values - prior[ran]))
            model.mean = model.mean + prior
            gain += model.improvement(float(values.max())) / len(self.priors)
        failed = [i for i, outcome in known.items() if outcome.kind == OUT_OF_MEMORY]
        peaks = [known[i].peak_memory for i in ran]
        return gain * fits(self.grid, ran, peaks, failed) ** (1.0 + MORE_CARE * _in_a_row(known))


def _in_a_row(known: Known) -> int:
    """Return how many measurements at the end of `known` (in order) ran out of memory, one directly after another."""
    last = [outcome.kind == OUT_OF_MEMORY for outcome in reversed([*known.values()])]
    return next((i for i, failed in enumerate(last) if not failed), len(last))


def best_of(known: Known) -> int | None:
    """Return the number of the fastest configuration in `known` (number --> outcome), or None if none has finished."""
    ran = [i for i, outcome in known.items() if outcome.kind == OK]
    return max(ran, key=lambda i: known[i].throughput, default=None)


def easiest(grid: Grid, known: Known, left: Sequence[int]) -> int | None:
    """Return the number of the configuration to measure next while all in `known` (number --> outcome) have failed.

    Candidates are those in `left` (not measured yet) that surely need no more memory than each one that ran out of it;
    if there are none, all in `left`. The middle candidate in order of rising memory use is taken, or the first one
    once three configurations have run out of memory. The result is None if `left` is empty.
    """
    if not left:
        return None
    failed = [i for i, outcome in known.items() if outcome.kind == OUT_OF_MEMORY]
    less = np.ones(len(grid.points), dtype=bool)
    for i in failed:
        less &= grid.takes_less(i)
    free = [i for i in left if less[i]] or list(left)
    amount = {i: int(less[[i]].sum()) + int(grid.takes_less(i).sum()) for i in free}
    ordered = sorted(free, key=lambda i: (amount[i], i))
    return ordered[len(ordered) // 2] if len(failed) < 3 else ordered[0]


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "model": Model, "random": shuffled, "exhaustive": exhaustive,
}  # fmt: skip


def find_strategy(name: str) -> Callable[..., Strategy]:
    """Return the function (grid, **options) --> strategy `name` ("model", "random", "exhaustive"); else SlapoError."""
    if name not in STRATEGIES:
        hint = f"choose one of {', '.join(STRATEGIES)}"
        raise SlapoError("tune", f"search={name!r}", "no such strategy", hint)
    return STRATEGIES[name]
