"""Reports of a tuning search: lines, a table, JSON, CSV, plots, and `tuning.json` of a published schedule (a card)."""

import csv
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo_zoo.tune.database import Scope
from slapo_zoo.tune.grid import Grid, is_number
from slapo_zoo.tune.outcome import Outcome
from slapo_zoo.tune.space import Space
from slapo_zoo.tune.tuner import OnTrial, Result, Trial
from slapo_zoo.weights.ledger import as_table
from slapo_zoo.zoo.cards import files
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.tuned import TUNING


def printer(total: int) -> OnTrial:
    """Return a callback that prints a line per measurement: its number out of at most `total`, its result, the best so far."""

    def on_trial(trial: Trial, result: Result) -> None:
        best = result.best
        said = f"{best.outcome.throughput:.4g} rows/s" if best else "-"
        sys.stdout.write(f"{len(result.trials)}/{total}  {line_of(trial)}  best {said}\n")
        sys.stdout.flush()

    return on_trial


def line_of(trial: Trial) -> str:
    """Format one measurement in one line: its throughput or kind of failure, and the configuration."""
    outcome = trial.outcome
    known = " (from the database)" * trial.was_known
    rate = f" {outcome.throughput:.4g} rows/s" if outcome.throughput else ""
    why = f": {outcome.message}" if outcome.kind not in ("ok",) and outcome.message else ""
    return f"{Space.cfg_dict_to_str(trial.point)} {outcome.kind}{rate}{known}{why}"


def as_text(result: Result, most: int = 10) -> str:
    """Format a search: the `most` fastest configurations, failures by kind, and configurations that were not measured."""
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.point))
    ran = (t for t in result.trials if t.outcome.kind == "ok")
    ran = sorted(ran, key=lambda t: -t.outcome.throughput)[:most]
    rows = [(*(t.point.get(name, "-") for name in names), f"{t.outcome.throughput:.4g}",
             f"{t.outcome.peak_memory / 2**20:.0f}") for t in ran]  # fmt: skip
    title = f"{len(result.trials)} evaluations"
    kinds = [trial.outcome.kind for trial in result.trials]
    lines = [as_table(title, (*names, "rows/s", "peak MiB"), rows),
             ", ".join(f"{kind}: {kinds.count(kind)}" for kind in dict.fromkeys(kinds))]  # fmt: skip
    lines += [f"never measured: {count} ({why})" for why, count in result.pruned.items()]
    return "\n".join(lines)


def as_json(result: Result) -> dict[str, Any]:
    """Return the result of a search as JSON data: every measurement in order, and the index of the best."""
    trials = [
        {"point": trial.point, **vars(trial.outcome), "was_known": trial.was_known}
        for trial in result.trials
    ]
    best = result.trials.index(result.best) if result.best else None
    return {"best": best, "trials": trials, "never_measured": dict(result.pruned)}


def write_csv(result: Result, path: Path) -> None:
    """Write a CSV file with one line per measured configuration of the search `result`, in order."""
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.point))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "kind", "rows_per_s", "peak_bytes", "steps", "message"])
        for trial in result.trials:
            o = trial.outcome
            values = [trial.point.get(name, "") for name in names]
            writer.writerow([*values, o.kind, o.throughput, o.peak_memory, o.steps, o.message])


def draw_trace(result: Result, path: Path) -> None:
    """Plot the throughput of every measurement of a search, and the best so far, into the image file `path`."""
    plt = _pyplot()
    rates = [trial.outcome.throughput for trial in result.trials]
    best = [max(rates[: i + 1]) for i in range(len(rates))]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(rates) + 1), rates, "o", label="evaluation; failures at 0")
    axes.step(range(1, len(rates) + 1), best, where="post", label="best so far")
    axes.set(xlabel="evaluation", ylabel="rows/s")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def draw_surface(result: Result, grid: Grid, path: Path) -> bool:
    """Plot median throughput over the two numeric symbols (tuned variables) with most values into the image `path`;
    return False, and plot nothing, if the search has fewer than two.
    """
    numeric = [
        n for n in grid.names if len(grid.values[n]) > 1 and all(map(is_number, grid.values[n]))
    ]
    numeric = sorted(numeric, key=lambda n: -len(grid.values[n]))[:2]
    if len(numeric) < 2:
        return False
    plt, (x, y) = _pyplot(), numeric
    cells: dict[tuple[Any, Any], list[float]] = {}
    for trial in result.trials:
        if x in trial.point and y in trial.point:
            cells.setdefault((trial.point[x], trial.point[y]), []).append(trial.outcome.throughput)
    nan = float("nan")
    values = [
        [statistics.median(cells.get((a, b), [nan])) for a in grid.values[x]]
        for b in grid.values[y]
    ]
    figure, axes = plt.subplots(figsize=(7, 4))
    image = axes.imshow(values, origin="lower", aspect="auto")
    axes.set(xlabel=x, ylabel=y, xticks=range(len(grid.values[x])), yticks=range(len(grid.values[y])),
             xticklabels=grid.values[x], yticklabels=grid.values[y])  # fmt: skip
    figure.colorbar(image, label="rows/s; 0 failed, white not measured")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return True


def _pyplot() -> Any:
    from slapo_zoo.pipeline.trace_files import require_matplotlib

    require_matplotlib()
    import matplotlib.pyplot as plt

    return plt


def record(card: Path, scope: Scope, point: Mapping[str, Any], outcome: Outcome) -> None:
    """Write the fastest configuration of a search, `point` (option --> value), into `tuning.json` in the folder of a
    card, i.e. of a published schedule, over an earlier entry for the same device and setting (tokens per row, dtype,
    memory limit). `scope` has device, setting and software of the measurement, `outcome` its result.

    Raises:
        CardError: the folder `card` is no complete card.
    """
    read_card(card)  # raises CardError if it is no card
    before = json.loads(files.read(card, TUNING)) if (card / TUNING).exists() else {}
    setting = ", ".join(f"{name}={value}" for name, value in sorted(scope.setting.items()))
    entry = {
        "point": dict(point), "rows_per_s": round(outcome.throughput, 4),
        "peak_memory_bytes": outcome.peak_memory, "steps": outcome.steps, "model": scope.model,
        "setting": dict(scope.setting), "software": dict(scope.versions),
    }  # fmt: skip
    before.setdefault(scope.device, {})[setting or "-"] = entry
    part = card / f".git-part-{TUNING}"  # a name that no card has
    part.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, card / TUNING)
