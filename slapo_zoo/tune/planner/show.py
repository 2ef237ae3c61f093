"""What a search of layouts found: as tables, as JSON, and the winner as a file that others load."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slapo_zoo.tune.planner.advice import worth
from slapo_zoo.tune.planner.hardware import GIB
from slapo_zoo.tune.planner.search import Forecasted, Found, Planner, require_feasible

COLUMNS = (
    "tp", "pp", "dp", "micro-batches", "order", "recompute", "sp", "step s", "tokens/s", "bubble", "GiB",
    "comm GB",
)  # fmt: skip


def as_json(planner: Planner, found: Found, most: int) -> dict[str, Any]:
    """The outcome for programs; sizes in bytes, times in seconds."""
    return {
        "hardware": asdict(found.hardware), "parameters": found.parameters, "batch": found.rows,
        "seq_len": found.seq_len, "looked_at": found.looked_at, "fit": len(found.feasible),
        "best": asdict(worth(planner, found.feasible[0])) if found.feasible else None,
        "layouts": [_entry(found, f) for f in found.feasible[:most]],
        "refused": [{"layout": name, "why": why} for name, why in found.refused],
    }  # fmt: skip


def _entry(found: Found, f: Forecasted) -> dict[str, Any]:
    return {
        "knobs": f.layout.knobs(), "rows_of_a_micro_batch": f.layout.rows,
        "step": asdict(f.step), "tokens_per_s": found.tokens_per_s(f), "fullest_rank": f.fullest,
        "memory": [asdict(rank) for rank in f.ranks],
    }  # fmt: skip


def show(planner: Planner, found: Found, most: int, explain: bool) -> None:
    """Print the fastest layouts, and with `explain` why the others cannot be."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    fit = f"{len(found.feasible)} of {found.looked_at} configurations fit"
    title = f"{found.parameters / 1e9:.3g}B parameters on {found.hardware.name}: {fit}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:  # a narrow terminal breaks texts, and shortens no number
        is_text = name in ("micro-batches", "order", "recompute")
        table.add_column(name, no_wrap=not is_text, overflow="fold")
    for f in found.feasible[:most]:
        table.add_row(*_cells(found, f))
    console.print(table)
    console.print(f"predicted from: {found.hardware.source}")
    if found.feasible:
        console.print(worth(planner, found.feasible[0]).text())
        console.print(f"from_pretrained(..., {call_of(found.feasible[0])})")
    for name, why in found.refused if explain else ():
        console.print(f"{name}: {why}")


def _cells(found: Found, f: Forecasted) -> list[str]:
    at = f.layout
    order = at.pipeline_order if at.pp > 1 else "-"
    again = (
        f"{at.checkpoint_ratio:g} {at.checkpoint_policy}".strip() if at.checkpoint_ratio else "-"
    )
    comm = f.step.tp_bytes + f.step.dp_bytes + f.step.pp_bytes
    total = (f.memory + found.hardware.reserved) / GIB
    copies = str(at.dp) + f" ZeRO-{at.zero_stage}" * (at.dp_shard > 1)
    return [
        str(at.tp), str(at.pp), copies, f"{at.micro_batches} x {at.rows} rows",
        f"{order} x{at.stages_per_rank}" if at.stages_per_rank > 1 else order, again,
        "yes" if at.sequence_parallel else "-", f"{f.step.seconds:.3g}",
        f"{found.tokens_per_s(f):.3g}", f"{f.step.bubble:.1%}", f"{total:.1f}", f"{comm / 1e9:.3g}",
    ]  # fmt: skip


def call_of(f: Forecasted) -> str:
    """The knobs of a layout as arguments of `from_pretrained`."""
    return ", ".join(f"{name}={value!r}" for name, value in f.layout.knobs().items())


def write_schedule(planner: Planner, found: Found, path: Path) -> Forecasted:
    """Write the program of the fastest layout; `from_pretrained(schedule=path)` takes it.

    Args:
        planner: that searched.
        found: what it found.
        path: of the JSON file.

    Raises:
        MeshError: nothing fits.
    """
    from slapo_zoo.cards.make import make_program
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.outline import Outline

    best = require_feasible(found, "--write")
    at = best.layout
    virtual = at.stages_per_rank if at.stages_per_rank > 1 else None
    outline = Outline(
        planner.family.config, planner.family.cls, Mesh(at.tp, at.pp, at.dp), planner.dtype,
        checkpoint_ratio=at.checkpoint_ratio, sequence_parallel=at.sequence_parallel,
        pipeline_order=at.pipeline_order, stages_per_rank=virtual, checkpoint_policy=at.checkpoint_policy,
    )  # fmt: skip
    program = make_program(outline.schedule, outline.model.config, outline.cls)
    path.write_bytes(program.to_bytes())
    return best
