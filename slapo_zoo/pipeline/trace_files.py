"""Write a timeline to files: a Chrome trace (chrome://tracing, Perfetto) and a PNG."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.pipeline.timeline import NAMES, Span, bubble, gaps, makespan

COLORS = {  # distinct for colour-blind readers too (Okabe and Ito)
    "forward": "#0072B2",
    "backward": "#009E73",
    "backward of inputs": "#009E73",
    "backward of weights": "#56B4E9",
    "communication": "#D55E00",
    "idle": "#E8E8E8",
}


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return a timeline (timed actions) as a Chrome trace: one lane per rank, and "bubble", the share of idle time."""
    begin = min(span.begin for span in spans)
    rows = [(s.rank, NAMES[s.action.kind], str(s.action), s.begin, s.end) for s in spans]
    rows += [(g.rank, g.kind, g.kind, g.begin, g.end) for g in gaps(spans) if g.kind != "idle"]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    for rank, kind, name, since, until in sorted(rows, key=lambda row: row[3]):
        times = {"ts": (since - begin) * 1e6, "dur": (until - since) * 1e6}
        events.append({"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": rank, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms", "bubble": bubble(spans)}


def write_chrome_trace(spans: Sequence[Span], path: Path) -> None:
    """Write a timeline (`spans`, the timed actions of a step) to `path` as the JSON of a Chrome trace."""
    path.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")


def require_matplotlib() -> Any:
    """Return the matplotlib module; without it raise SlapoError with the install command."""
    try:
        import matplotlib
    except ImportError:
        hint = 'pip install "slapo-zoo[bench]", or leave the picture out'
        raise SlapoError("trace", "PNG", "found no matplotlib", hint) from None
    matplotlib.use("Agg")
    return matplotlib


def draw(spans: Sequence[Span], path: Path, title: str = "") -> None:
    """Write a timeline (timed actions) as PNG to `path`: one lane per rank, micro-batches numbered, idle time grey."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin, whole = min(span.begin for span in spans), makespan(spans)
    ranks = sorted({span.rank for span in spans})
    figure = Figure(figsize=(14, 1.2 + 0.6 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    bars = [(s.rank, NAMES[s.action.kind], s.begin, s.end) for s in spans]
    bars += [(g.rank, g.kind, g.begin, g.end) for g in gaps(spans)]
    for rank, kind, since, until in bars:
        axes.broken_barh([((since - begin) * 1e3, (until - since) * 1e3)], (rank - 0.4, 0.8),
                         color=COLORS[kind], edgecolor="white", linewidth=0.5)  # fmt: skip
    for span in spans:
        if span.end - span.begin > whole / 80:  # a number needs room
            middle = ((span.begin + span.end) / 2 - begin) * 1e3
            axes.text(middle, span.rank, str(span.action.micro_batch), ha="center", va="center",
                      color="white", fontsize=7)  # fmt: skip
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, whole * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{title} bubble {bubble(spans):.1%}".strip(), loc="left", fontsize=10)
    kinds = [kind for kind in COLORS if any(bar[1] == kind for bar in bars)]
    handles = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
    axes.legend(handles=handles, ncols=len(handles), loc="lower right", fontsize=7,
                bbox_to_anchor=(1, 1), frameon=False)  # fmt: skip
    figure.savefig(path, dpi=120)
