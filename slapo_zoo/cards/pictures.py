"""Pictures that compare a card's measurements with the baselines: throughput.png and memory.png."""

import io
from collections.abc import Mapping
from typing import Any

PICTURES = {  # measure of bench.json --> (file, label of the axis)
    "tokens_per_s": ("throughput.png", "tokens per second"),
    "peak_memory_gib": ("memory.png", "peak memory, GiB"),
}


def pictures_of(bench: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (file name, axis label) of each picture that `draw` would make of the same `bench`."""
    return [PICTURES[measure] for measure in PICTURES if len(_bars(bench, measure)) > 0]


def draw(bench: Mapping[str, Any]) -> dict[str, bytes]:
    """Draw the pictures of a card, and return file name --> PNG bytes; unmeasured values get no picture.

    Args:
        bench: measure --> value or "unmeasured"; its entry "baselines" is baseline --> measure --> value.

    Raises:
        ImportError: something was measured, and matplotlib is not installed.
    """
    found = {}
    for measure, (name, label) in PICTURES.items():
        if bars := _bars(bench, measure):
            found[name] = _bar_chart(bars, label, str(bench.get("device", "")))
    return found


def _bars(bench: Mapping[str, Any], measure: str) -> dict[str, float]:
    """Return {name: value} of a measure for this schedule and its baselines; `bench` as in `draw`; {} if unmeasured."""
    own = bench.get(measure)
    if not _is_number(own):
        return {}
    others = bench.get("baselines")
    rows = others.items() if isinstance(others, Mapping) else ()
    beside = {str(n): r[measure] for n, r in rows if isinstance(r, Mapping) and _is_number(r.get(measure))}  # fmt: skip
    return {"this schedule": float(own), **beside}  # pyright: ignore[reportArgumentType]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bar_chart(bars: Mapping[str, float], label: str, device: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 0.6 + 0.4 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and without the state of pyplot
    axes = figure.add_subplot()
    found = axes.barh(list(bars), list(bars.values()), color=["#2b6cb0", *["#a0aec0"] * len(bars)])
    axes.bar_label(found, fmt="{:,.4g}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    axes.set_title(device, fontsize="small", loc="left", parse_math=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120, metadata={"Software": None})
    return data.getvalue()
