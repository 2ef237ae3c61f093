"""Reports of a layout search: throughput of a simulated step, its stages, tables, JSON, the best layout as a file."""

import itertools
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slapo_zoo.tune.planner.hardware import GIB
from slapo_zoo.tune.planner.layout import Layout, places_of
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.search_result import Forecasted, Found, require_feasible
from slapo_zoo.weights.ledger import as_table, filled

FASTER = 2.0  # factor for links and network, to see whether they bind
COLUMNS = (
    "tp", "pp", "dp", "cp", "micro-batches", "order", "recompute", "sp", "step s", "tokens/s", "bubble", "GiB",
    "GB sent",
)  # fmt: skip


@dataclass(frozen=True)
class Worth:
    """Throughput, MFU and bottleneck of a predicted step.

    Args:
        tokens_per_s: tokens per second of the whole cluster.
        mfu: model flops per second divided by the peak rate; None where the device's peak is unknown.
        gpu_hours: device hours to train on 10^9 tokens.
        binds: dict of the parts of a step, "compute", "bubble", "sums over dp and transfers" and "optimizer" --> share
            of the step's time, 0 to 1.
        faster_link: share of the step that links and network of twice the rate would save.
        spare: bytes of device memory that stay free on the fullest rank.
        error: mean relative error of forecast step times on this device against published runs; None if unknown.
    """

    tokens_per_s: float
    mfu: float | None
    gpu_hours: float
    binds: dict[str, float]
    faster_link: float
    spare: float
    error: float | None

    def text(self) -> str:
        """Return two lines of text: throughput, MFU and GPU hours; then the share of the step's time of each part."""
        error = "unmeasured" if self.error is None else f"± {self.error:.0%}"
        used = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        large = ((name, share) for name, share in self.binds.items() if share >= 0.005)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in large)
        return (
            f"simulated ({error}): {self.tokens_per_s:.3g} tokens/s{used}, "
            f"{self.gpu_hours:.3g} GPU hours for 10^9 tokens\n"
            f"share of the step: {shares}; links twice as fast would save {self.faster_link:.0%}; "
            f"{self.spare / 2**30:.1f} GiB of memory are free"
        )


def worth(planner: Planner, found: Forecasted) -> Worth:
    """Return throughput, MFU and bottleneck of the training step `found`, which the planner has forecast."""
    at, step, hardware = found.layout, found.step, planner.hardware
    gpus = at.devices
    tokens = at.dp * at.micro_batches * at.rows * planner.seq_len
    uses = planner.profile_of(at).uses(at.rows)
    flops = sum(use.forward.flops + use.backward.flops for use in uses)
    flops *= at.tp * at.replicas * at.micro_batches
    peak = hardware.peak * gpus * step.seconds
    links = replace(hardware, link=FASTER * hardware.link, network=FASTER * hardware.network)
    other = planner.on(links).forecast(at).step.seconds
    waits = step.gradients_s + step.transfer_s
    parts = {"sums over dp and transfers": waits, "optimizer": step.optimizer_s}
    shares = {name: seconds / step.seconds for name, seconds in parts.items()}
    shares = {"bubble": step.bubble_share} | shares
    return Worth(
        tokens / step.seconds, flops / peak if peak else None,
        gpus * step.seconds / tokens * 1e9 / 3600,
        {"compute": max(1.0 - sum(shares.values()), 0.0)} | shares, 1.0 - other / step.seconds,
        hardware.memory - hardware.reserved - found.memory, hardware.error or None,
    )  # fmt: skip


def as_json(planner: Planner, found: Found, most: int) -> dict[str, Any]:
    """Return JSON data (bytes, seconds) of a layout search `found`: its `most` fastest layouts, why others were refused."""
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


def as_text(planner: Planner, found: Found, most: int, explain: bool) -> str:
    """Return a text on `found`, a layout search: its `most` fastest layouts; with `explain` why others were refused."""
    fit = f"{len(found.feasible)} of {found.looked_at} configurations fit"
    title = f"{found.parameters / 1e9:.3g}B parameters on {found.hardware.name}: {fit}"
    size = found.hardware.memory / GIB
    lines = [as_table(title, COLUMNS, [_cells(found, f) for f in found.feasible[:most]]),
             "sp: sequence parallelism; step s: seconds per step; bubble: idle share of the step;\n"
             f"GiB: memory of the fullest rank, of {size:.3g}; GB sent: by one rank in a step\n"
             f"predicted from: {found.hardware.source}"]  # fmt: skip
    if found.feasible:
        best = found.feasible[0]
        lines += [worth(planner, best).text(), f"from_pretrained(..., {call_of(best)})"]
    lines += [f"{name}: {why}" for name, why in found.refused] if explain else []
    return filled("\n".join(lines))


def _cells(found: Found, f: Forecasted) -> list[str]:
    at = f.layout
    order = at.pipeline_order if at.pp > 1 else "-"
    again = f"{at.checkpoint_ratio:g} {at.checkpoint_policy}" if at.checkpoint_ratio else "-"
    comm = f.step.tp_bytes + f.step.dp_bytes + f.step.pp_bytes + f.step.cp_bytes
    total = (f.memory + found.hardware.reserved) / GIB
    shards = f" (ZeRO-{at.zero_stage} over {at.dp_shard})" * (at.dp_shard > 1)
    return [
        str(at.tp), str(at.pp), f"{at.dp}{shards}", str(at.cp), f"{at.micro_batches} of {at.rows} rows",
        f"{order} x{at.stages_per_rank}" if at.stages_per_rank > 1 else order, again.strip(),
        "yes" if at.sequence_parallel else "-", f"{f.step.seconds:.3g}",
        f"{found.tokens_per_s(f):.3g}", f"{f.step.bubble_share:.1%}", f"{total:.1f}", f"{comm / 1e9:.3g}",
    ]  # fmt: skip


def call_of(f: Forecasted, without: Collection[str] = ()) -> str:
    """Return the layout of forecast `f` as the text of arguments of `from_pretrained` ("tp=2, pp=4"), leaving out
    the names in `without`.
    """
    knobs = f.layout.knobs().items()
    return ", ".join(f"{name}={value!r}" for name, value in knobs if name not in without)


def write_schedule(planner: Planner, found: Found, path: Path) -> Forecasted:
    """Write the schedule of the fastest layout in `found`, the result of a layout search, as a JSON file for
    `from_pretrained(schedule=path)`; return the forecast of that layout.

    Raises:
        MeshError: no layout fits.
    """
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.cards.make import make_program
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


@dataclass(frozen=True)
class StageForecast:
    """Predicted time and activations of one pipeline stage.

    Args:
        rank: pp coordinate of the rank that runs the stage.
        extent: paths of the first and the last module (block, embedding, head) of the stage, as text.
        seconds: time of forward plus backward of one micro-batch.
        flops: floating-point operations of forward plus backward on one tp rank, recomputation included.
        activations: bytes kept from the forward of a micro-batch to its backward.
        received: bytes that the stage receives per micro-batch from the stage before.
    """

    rank: int
    extent: str
    seconds: float
    flops: float
    activations: float
    received: float


def forecast(planner: Planner, layout: Layout) -> tuple[Forecasted, list[StageForecast]]:
    """Return (memory and time of a training step under `layout`, the forecast of each pipeline stage)."""
    found, places = planner.forecast(layout), places_of(layout)
    names = [unit.name for unit in planner.profile_of(layout).units]
    edges = itertools.pairwise([0, *planner.cuts(layout.stages), len(names)])
    stages = []
    for i, ((a, b), (memory, time)) in enumerate(
        zip(edges, planner.stages_of(layout), strict=True)
    ):
        extent = names[a] if b == a + 1 else f"{names[a]} .. {names[b - 1]}"
        stages.append(
            StageForecast(
                places.rank_of(i), extent, time.seconds, time.flops, memory.held, memory.received
            )
        )
    return found, stages
