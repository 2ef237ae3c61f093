"""Picture of a comparison: step time and parameter bytes per rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PANELS = {"p50 ms": "step, ms (p20 to p80)", "parameters MiB": "parameters per rank, MiB",
          "first gradients s": "load to first gradients, s"}  # fmt: skip


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw bars of every contender, one row of panels per result, into the file `path`; matplotlib is needed."""
    from matplotlib.figure import Figure

    shown = {name: result["speed"] for name, result in results.items() if result["speed"]}
    figure = Figure(figsize=(13, 0.6 + 2.3 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), len(PANELS), squeeze=False)
    for axes, (name, rows) in zip(grid, shown.items(), strict=True):
        names = [row["contender"] for row in rows]
        colours = ["#c0392b" if text.startswith("slapo_zoo") else "#7f8c8d" for text in names]
        for axis, (column, title) in zip(axes, PANELS.items(), strict=True):
            values = [row[column] for row in rows]
            bounds = None
            if column == "p50 ms":
                bounds = [[row["p50 ms"] - row["p20 ms"] for row in rows],
                          [row["p80 ms"] - row["p50 ms"] for row in rows]]  # fmt: skip
            axis.barh(names, values, xerr=bounds, color=colours)
            axis.invert_yaxis()
            axis.set_title(f"{name}: {title}", fontsize=9)
            axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)
