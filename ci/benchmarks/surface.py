"""Picture of throughput over the tuning space, and of searches on it: docs/benchmarks/tuner.png.

The points are those that `bench tune` measured on one CPU (tune_cpu.json); nothing is measured here.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.tune import DATA, SYMBOLS
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import OK, Outcome
from slapo_zoo.tune.strategies import find_strategy
from slapo_zoo.tune.tuner import Limits, Tuner

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "tuner.png"
STRATEGIES = ("model", "random")
EVALUATIONS = 20
PLANE = {"threads": 2, "attention": "sdpa", "kernels": ""}


def trials(points: list[dict[str, Any]], name: str, start: int) -> list[dict[str, Any]]:
    """Return the configurations that the strategy `name` tries, in its order, beginning at configuration `start`."""
    grid = Grid([{n: point[n] for n in SYMBOLS} for point in points])

    def known(point: dict[str, Any], steps: int) -> Outcome:
        number = grid.find(point)
        assert number is not None  # noqa: S101 - the grid is made of them
        return Outcome(OK, points[number]["rows_per_s"])

    strategy = find_strategy(name)(grid, start=start, seed=start)
    found = Tuner(grid, known, strategy, limits=Limits(EVALUATIONS)).run()
    return [points[trial.number] for trial in found.trials]


def best_so_far(points: list[dict[str, Any]], name: str, starts: range) -> list[float]:
    """Return the best throughput after each evaluation, as a share of the maximum: the median over `starts`."""
    most = max(point["rows_per_s"] for point in points)
    runs = []
    for start in starts:
        rates = [point["rows_per_s"] / most for point in trials(points, name, start)]
        rates += rates[-1:] * (EVALUATIONS - len(rates))
        runs.append([max(rates[: i + 1]) for i in range(EVALUATIONS)])
    return [statistics.median(same) for same in zip(*runs, strict=True)]


def draw(points: list[dict[str, Any]], curves: dict[str, list[float]]) -> None:
    """Draw a slice of the measured space on the left, and the progress of each strategy (`curves`) on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    xs, ys = SYMBOLS["batch_size"], SYMBOLS["checkpoint_ratio"]
    plane = [p for p in points if PLANE.items() <= p.items()]
    rates = {(p["batch_size"], p["checkpoint_ratio"]): p["rows_per_s"] for p in plane}
    left.imshow([[rates[x, y] for x in xs] for y in ys], origin="lower", aspect="auto")
    middle = statistics.mean(rates.values())
    for (x, y), rate in rates.items():
        color = "k" if rate > middle else "w"
        left.text(xs.index(x), ys.index(y), f"{rate:.0f}", ha="center", va="center", color=color)
    left.set(xlabel="batch_size", ylabel="checkpoint_ratio", xticks=range(len(xs)), xticklabels=xs,
             yticks=range(len(ys)), yticklabels=ys, title="rows/s; 2 threads, sdpa, no kernel")  # fmt: skip
    for name, shares in curves.items():
        right.step(range(1, EVALUATIONS + 1), [100 * s for s in shares], where="post", label=name)
    right.set(xlabel=f"evaluations, of {len(points)} points", ylabel="% of the best",
              title="best so far, median over the starts")  # fmt: skip
    right.legend()
    figure.savefig(PICTURE, dpi=120, bbox_inches="tight")
    plt.close(figure)


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return a row per strategy: the best result after 5, 10 and 20 evaluations; draw the picture, unless `quick`."""
    points = json.loads(DATA.read_text(encoding="utf-8"))["points"]
    starts = range(0, len(points), 24 if quick else 4)
    curves = {name: best_so_far(points, name, starts) for name in STRATEGIES}
    if not quick:
        draw(points, curves)
    rows = [
        {"what": name, "best after 5": shares[4], "after 10": shares[9], "after 20": shares[-1]}
        for name, shares in curves.items()
    ]
    return {f"share of the best of {len(points)} points, median over {len(starts)} starts": rows}
