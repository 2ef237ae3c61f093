"""Draw the pictures of the documentation as SVG, from the code: `python3 ci/run.py pictures`.

Every picture has light and dark colours. A test draws each again and compares it with its file.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel

from slapo_zoo.parallel.placement import Placement
from slapo_zoo.pipeline.orders import ORDERS, StageMap
from slapo_zoo.pipeline.timeline import NAMES, bubble, makespan, simulate
from slapo_zoo.tune.planner.hardware import GIB, HARDWARE
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 } .small { font-size: 11px } .head { font-weight: 600 }
.line { stroke: #57606a; stroke-width: 1.5; fill: none } .box { fill: #f6f8fa; stroke: #8c959f }
.a { fill: #0072b2 } .b { fill: #e69f00 } .c { fill: #009e73 } .d { fill: #cc79a7 } .idle { fill: #e6e8eb }
.on { fill: #ffffff; font-size: 10px }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .box { fill: #161b22; stroke: #6e7681 } .line { stroke: #9198a1 } .idle { fill: #30363d } .on { fill: #ffffff }
}"""
RANKS = "ab"  # the colour of each tp rank


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return the SVG text of a picture with these parts; screen readers read out `title`."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
    marker = '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#57606a"/></marker></defs>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", marker, *parts, "</svg>", ""])  # fmt: skip


def rect(x: float, y: float, w: float, h: float, kind: str) -> str:
    """Return the SVG of a rectangle; `kind` is a class of STYLE."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return the SVG of a line of text; `kind` is a class of STYLE."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return the SVG of a straight arrow."""
    return f'<path class="line" d="M{x1:g},{y1:g} L{x2:g},{y2:g}" marker-end="url(#tip)"/>'


def shards() -> str:
    """Draw how a checkpoint becomes shards on tp=2 (column and row parallel), trains, and becomes a file again."""
    parts = []
    for i, (name, axis, cuts) in enumerate((("fc1.weight [8, 4]", 0, "rows of the file"), ("fc2.weight [4, 8]", 1, "columns of the file"))):  # fmt: skip
        top = 40 + 150 * i
        rows, columns = (8, 4) if axis == 0 else (4, 8)
        cell, size = 12, rows if axis == 0 else columns
        owner = [next(r for r in range(2) for a, b in Placement(axis).runs(size, 2, r) if a <= j < b) for j in range(size)]  # fmt: skip
        for place, x, sign in (("file", 20, "model.safetensors"), ("saved", 660, "saved: the same file")):  # fmt: skip
            parts.append(text(x, top - 14, sign if i == 0 else "", "small"))
            for row in range(rows):
                for column in range(columns):
                    mine = owner[row if axis == 0 else column]
                    parts.append(rect(x + column * cell, top + row * cell, cell - 1, cell - 1, RANKS[mine]))  # fmt: skip
            parts.append(text(x, top + rows * cell + 16, name if place == "file" else "", "small"))
        for rank in range(2):
            y = top + rank * 62
            parts.append(rect(190, y, 130, 46, "box"))
            parts.append(rect(190, y, 8, 46, RANKS[rank]))
            local = list(Placement(axis).local_shape((rows, columns), 2, rank))
            parts.append(text(206, y + 18, f"rank {rank} reads {local}"[:22], "small"))
            parts.append(text(206, y + 35, cuts, "small"))
            parts.append(arrow(125, top + 46, 186, y + 23))
            parts.append(arrow(324, y + 23, 366, y + 23))
            parts.append(arrow(606, y + 23, 652, top + 46))
    for rank in range(2):
        y = 40 + rank * 62
        parts += [rect(370, y, 232, 46, "box"), rect(370, y, 8, 46, RANKS[rank])]
        parts.append(text(386, y + 18, "column parallel: y = x W1", "small"))
        parts.append(text(386, y + 35, "backward: all-reduce dx  (f)", "small"))
        parts += [rect(370, y + 150, 232, 46, "box"), rect(370, y + 150, 8, 46, RANKS[rank])]
        parts.append(text(386, y + 168, "row parallel: z = y W2", "small"))
        parts.append(text(386, y + 185, "forward: all-reduce z  (g)", "small"))
    parts.append(text(20, 326, "Each rank reads only its slices. The gradient of a slice has the shape of the slice; every rank writes it back to the same place.", "small"))  # fmt: skip
    return svg(800, 340, "A checkpoint becomes shards on two ranks, and a file again", parts)


def layers() -> list[str]:
    """Return the floors of the package, lowest first, from tests/house/test_layers.py, which checks imports by them."""
    source = (ROOT / "tests" / "house" / "test_layers.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS":
            return list(ast.literal_eval(node.value))
    raise SystemExit("pictures: tests/house/test_layers.py has no LAYERS")


def about(package: str) -> str:
    """Return the first sentence of a package's docstring."""
    linked = {"kernels": "one file per kernel", "zoo.schedules": "one table per architecture"}
    if package in linked:
        return linked[package]
    place = ROOT / "slapo_zoo" / package.replace(".", "/")
    file = place / "__init__.py" if (place / "__init__.py").exists() else place.with_suffix(".py")
    words = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(words.split()).split(". ")[0].rstrip(".")[:104]


def floors() -> str:
    """Draw the packages of slapo_zoo as floors; each package imports only packages of lower floors."""
    parts, y = [], 16
    for number, floor in reversed(list(enumerate(layers(), 1))):
        for package in floor.split():
            parts += [rect(44, y, 860, 30, "box"), text(56, y + 20, package, "head")]
            parts.append(text(200, y + 20, about(package), "small"))
            parts.append(text(30, y + 20, str(number), "small", "end"))
            y += 34
        y += 6
    parts += [arrow(922, 20, 922, y - 10), text(30, y + 12, "A package imports only packages of lower floors; a test holds it.", "small")]  # fmt: skip
    return svg(940, y + 24, "The floors of the package", parts)


COLOURS = {"forward": "a", "backward": "c", "backward of inputs": "c", "backward of weights": "b"}


def timeline(name: str) -> str:
    """Draw one step of the pipeline order `name`: 4 ranks, 8 micro-batches, a backward takes twice a forward."""
    places = StageMap.make(name, 4, None)
    share = 1 / places.per_rank
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    spans = simulate(places.actions(8), lambda action: cost[action.kind] * share)
    unit, parts = 760 / makespan(spans), [text(70, 18, f"{name}: bubble {bubble(spans):.0%}", "head")]  # fmt: skip
    for rank in range(4):
        parts += [text(60, 48 + 30 * rank, f"rank {rank}", "small", "end"), rect(70, 32 + 30 * rank, 760, 24, "idle")]  # fmt: skip
    for span in spans:
        x, w = 70 + span.begin * unit, (span.end - span.begin) * unit
        y = 32 + 30 * span.rank
        parts.append(rect(x + 0.4, y, w - 0.8, 24, COLOURS[NAMES[span.action.kind]]))
        if w > 9:
            parts.append(text(x + w / 2, y + 16, str(span.action.micro_batch), "on", "middle"))
    kinds = dict.fromkeys(NAMES[span.action.kind] for span in spans)
    for i, kind in enumerate(kinds):
        parts += [rect(70 + 170 * i, 158, 12, 12, COLOURS[kind]), text(88 + 170 * i, 168, kind, "small")]  # fmt: skip
    return svg(850, 180, f"Timeline of the order {name} on 4 ranks with 8 micro-batches", parts)


PARTS = {"weights": "a", "gradients": "c", "optimizer": "d", "activations": "b", "working": "idle"}


def memory() -> str:
    """Draw the simulated peak memory of each pipeline rank, with and without recomputation."""
    planner = Planner(
        GPT2Config(n_layer=24, n_embd=1024, n_head=16),
        HARDWARE["h100"],
        1024,
        auto_class=GPT2LMHeadModel,
    )
    layout = Layout(pp=4, rows=4, micro_batches=8)
    shown = {"every activation is kept": layout, "every block is recomputed": replace(layout, checkpoint_ratio=1.0)}  # fmt: skip
    found = {name: planner.forecast(at).ranks for name, at in shown.items()}
    sums = [
        sum(getattr(rank, part) for part in PARTS) for ranks in found.values() for rank in ranks
    ]
    unit, parts, y = 640 / max(sums), [], 30
    for name, ranks in found.items():
        parts.append(text(70, y - 8, name, "head"))
        for number, rank in enumerate(ranks):
            x = 70.0
            parts.append(text(60, y + 16, f"rank {number}", "small", "end"))
            for part, colour in PARTS.items():
                width = getattr(rank, part) * unit
                parts.append(rect(x, y, max(width - 0.8, 0.0), 24, colour))
                x += width
            parts.append(text(x + 8, y + 16, f"{rank.total / GIB:.1f} GiB", "small"))
            y += 30
        y += 34
    for i, (part, colour) in enumerate(PARTS.items()):
        parts += [rect(70 + 130 * i, y - 22, 12, 12, colour), text(88 + 130 * i, y - 12, part, "small")]  # fmt: skip
    return svg(850, y, "Simulated memory of four pipeline ranks of a GPT-2 of 24 blocks", parts)


def pictures() -> Iterator[tuple[str, str]]:
    """Yield (file name, SVG text) of every picture."""
    yield "shards.svg", shards()
    yield "floors.svg", floors()
    yield "memory.svg", memory()
    for name in ORDERS:
        yield f"order_{name}.svg", timeline(name)


def main() -> None:
    """Write all pictures to docs/pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures():
        (FOLDER / name).write_text(content, encoding="utf-8")
    print(f"{len(list(pictures()))} pictures in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
