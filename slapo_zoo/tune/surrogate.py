"""Surrogate of measurements: a Gaussian process over a quadratic trend, and a model of memory use.

The trend says that step time changes smoothly with batch size and recomputation; the process corrects it
where measurements differ. Rasmussen and Williams 2006, chapter 2; expected improvement: Jones et al. 1998.
"""

from collections.abc import Sequence

import numpy as np

from slapo_zoo.tune.grid import Grid

CAUTION = 2.0  # a power of the chance to fit: the higher, the less is dared
KEPT = np.geomspace(0.1, 10.0, 25)  # of a row, beside its inputs: what recomputation may save
LENGTHS, NOISES = (0.25, 0.5, 1.0), (1e-3, 1e-2)
LINEAR, QUADRATIC, CONSTANT, SMOOTH = (
    1.0,
    0.25,
    4.0,
    0.25,
)  # prior variances of the trend, of scaled values


class Surrogate:
    """Gaussian-process model of a measured value: its mean and deviation at every configuration of a grid.

    Args:
        coordinates: [points, axes] in 0..1.
        measured: numbers of the configurations that were measured.
        values: measured value of each.
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
        """Return the expected improvement over the value `best` at every configuration, [points]."""
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
    """Return the probability [points] that each configuration fits into memory; 1 until one has failed.

    From measured peaks a linear model of memory is fitted (`Grid.memory_terms`); the limit lies between the
    highest measured peak and the lowest estimate of a failure. Without peaks, all memory laws of `_by_laws`
    that agree with the outcomes are averaged.

    Args:
        grid: the space.
        ran: numbers of configurations that fit.
        peaks: peak bytes of each; 0 where unknown.
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
    """Return [points]: the share of memory laws consistent with the outcomes under which a configuration fits.

    A law is: memory = rows * (1 + kept * share that is not recomputed), up to an unknown limit; `kept`
    takes the values of KEPT.
    """
    rows, kept = grid.memory_parts()
    memory = rows[None] * (1.0 + KEPT[:, None] * kept[None])  # [laws, points]
    low = memory[:, list(ran)].max(1) if len(ran) else np.zeros(len(KEPT))
    high = memory[:, list(failed)].min(1)
    agree = np.maximum(high - low, 0.0) / high  # how many limits lie between
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
    if high <= low:  # the estimate contradicts what happened
        return chance
    return np.clip((high - memory) / (high - low), 0.0, 1.0)
