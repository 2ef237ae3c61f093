"""Command `slapo-zoo plan`: forecasts what every rank reads, computes and holds; no rank is started."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import command, sizes_text, table_of_cut, take_mesh

Model = Annotated[str, typer.Argument(help="A checkpoint folder, a Hub id, or with --gpus a family.")]  # fmt: skip
Weights = Annotated[bool | None, typer.Option("--weights/--no-weights", help="Show only what is read from the files.")]  # fmt: skip
Training = Annotated[
    bool | None,
    typer.Option("--training/--no-training", help="Show only time and memory of a training step."),
]
SEARCH = "With --gpus"


@command
def plan(
    model: Model,
    layout: Any,
    weights: Weights = None,
    training: Training = None,
    every_rank: Annotated[bool, typer.Option(help="Print a line per rank, not per stage.")] = False,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches per step; default: 2 * pp.")] = None,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 1,
    seq_len: Annotated[int | None, typer.Option("--seq-len", "--seq", min=1, help="Tokens per row.")] = None,
    padding: Annotated[bool, typer.Option(help="Rows have padding: batches carry an attention mask.")] = True,
    gpus: Annotated[int | None, typer.Option(min=1, help="Search the fastest layout of this many GPUs.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device, e.g. 80GiB.", rich_help_panel=SEARCH)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step, over all replicas.", rich_help_panel=SEARCH)] = 1024,
    hardware: Annotated[str, typer.Option(help="h200, h100, a100, a100-40g, v100, cpu, or a file of `calibrate`.")] = "a100",
    precision: Annotated[str, typer.Option(help="bf16, fp16 (fp32 masters), bf16-pure, fp16-pure or fp32.")] = "bf16",
    runtime: Annotated[str, typer.Option(help="How the model is run: eager, kernels, compiled or megatron.")] = "eager",
    explain: Annotated[bool, typer.Option(help="Print why other layouts do not fit.", rich_help_panel=SEARCH)] = False,
    write: Annotated[Path | None, typer.Option(help="File for the fastest layout's schedule (JSON).", rich_help_panel=SEARCH)] = None,
    most: Annotated[int, typer.Option("--top", min=1, help="Number of layouts to show.", rich_help_panel=SEARCH)] = 10,
) -> Any:  # fmt: skip
    """Print what each rank of a layout (--tp, --pp, ...) would read at the load, compute in a step and hold in memory.

    No weight is read. With --gpus, simulate every layout of that many GPUs, and name the fastest that fits.
    """
    from slapo_zoo.cli.commands.plan_search import make_planner, search
    from slapo_zoo.errors import MeshError

    device = (hardware, memory, precision, runtime)
    mesh = take_mesh(layout)
    if gpus is None and (write or explain):
        what = "--write" if write else "--explain"
        problem = "this option is for a search over layouts, which --gpus starts"
        raise MeshError("plan", what, problem, "add --gpus N")
    if gpus is not None:
        if mesh.world_size > 1:
            problem = f"found {sizes_text(mesh)}, but a search tries every layout"
            hint = "leave out --gpus, or leave out tp, pp, dp and cp"
            raise MeshError("plan", f"--gpus {gpus}", problem, hint)
        return search(make_planner(model, seq_len, device, padding), gpus, batch, explain, write, most)  # fmt: skip
    from slapo_zoo.zoo.load_forecast import plan_weights

    data: dict[str, dict[str, Any] | None] = {"weights": None, "training": None}
    texts = []
    both = not weights and not training  # neither flag was given
    if weights or (both and weights is None):
        read = plan_weights(model, mesh.tp, mesh.pp, mesh.dp)
        data["weights"] = _weights_data(read)
        texts.append(_weights_text(read, f"{model}: {sizes_text(mesh)}", mesh.world_size, 1 if every_rank else mesh.tp))  # fmt: skip
    if training or (both and training is None):
        planner = make_planner(model, seq_len, device, padding)
        step = _forecast(planner, mesh, layout, micro_batches, micro_batch_size)
        data["training"] = _step_data(step)
        texts.append(_forecast_text(step, layout["pipeline_order"]))
    return data, "\n".join(texts)


def _forecast(planner: Any, mesh: Any, knobs: dict[str, Any], count: int | None, rows: int) -> Any:
    """Simulate a training step of one layout. Return (a Forecasted: time and memory; list of one StageForecast per
    pipeline stage; a Worth: throughput, MFU and bottleneck; name of the hardware).

    Args:
        planner: what `make_planner` returns, which knows the model and the hardware.
        mesh: sizes of tp, pp, dp and cp.
        knobs: name --> value of the layout's other flags, e.g. pipeline_order.
        count: micro-batches per step; None: 2 * pp with a pipeline, else 1.
        rows: rows per micro-batch.
    """
    from slapo_zoo.tune.planner.layout import Layout
    from slapo_zoo.tune.planner.layout_report import forecast, worth
    from slapo_zoo.zoo.options import BuildOptions

    family = planner.family
    table = table_of_cut("plan", mesh, family.config, family.cls, knobs)
    family.table = family.table if table == "zoo" else table
    found, stages = forecast(planner, Layout.of(BuildOptions(**knobs), mesh, rows, count))
    return found, stages, worth(planner, found), planner.hardware.name


def _weights_data(found: Any) -> dict[str, Any]:
    """Return `found`, the WeightsPlan of what each rank reads at the load, as a dict for `--json`: "ranks",
    "model_bytes", "assigned_bytes" (read by any rank), "missing" (tensors in no file), "unexpected" (unused keys).
    """
    ranks = [{**vars(rank), "files": sorted(rank.files)} for rank in found.ranks]
    return {
        "ranks": ranks, "model_bytes": found.model_bytes, "assigned_bytes": found.assigned_bytes,
        "missing": found.missing, "unexpected": found.unexpected,
    }  # fmt: skip


def _step_data(found: Any) -> dict[str, Any]:
    """Return the forecast of a step as a dict for `--json`: "stages" (time and activations of each), "ranks" (memory of
    each), "step" (seconds of its parts), "worth" (throughput, MFU, bottleneck), "bubble" (idle time), "micro_batches",
    "hardware". `found` is (Forecasted, list of StageForecast, Worth, name of the hardware), as `_forecast` returns.
    """
    step, stages, best, hardware = found
    ranks = [{"rank": i, **vars(rank)} for i, rank in enumerate(step.ranks)]
    return {
        "micro_batches": step.layout.micro_batches, "stages": [vars(stage) for stage in stages],
        "ranks": ranks, "bubble": step.step.bubble, "step": vars(step.step),
        "worth": vars(best), "hardware": hardware,
    }  # fmt: skip


def _forecast_text(found: Any, order: str) -> str:
    """Return the forecast of a step as text: a table of the pipeline stages' times, and one of each rank's memory.
    `found` is (Forecasted, list of StageForecast, Worth, name of hardware); `order`, e.g. "1f1b", is for the title.
    """
    from slapo_zoo.weights.ledger import as_table, filled, human

    step, parts, best, hardware = found
    whole = sum(stage.seconds for stage in parts)
    title = f"a step of {step.layout.micro_batches} micro-batches, order {order}, on {hardware} (--hardware)"
    names = ("stage", "rank", "units", "seconds of a micro-batch", "share", "activations of a micro-batch")  # fmt: skip
    stages = [(i, stage.rank, stage.extent, f"{stage.seconds:.3g}", f"{stage.seconds / whole:.1%}",
               human(round(stage.activations))) for i, stage in enumerate(parts)]  # fmt: skip
    kinds = ("weights", "gradients", "optimizer", "activations", "working", "buffers", "total")
    sizes = [(i, *(human(round(getattr(r, k))) for k in kinds)) for i, r in enumerate(step.ranks)]
    tables = (as_table(title, names, stages), as_table("most bytes per rank, with AdamW", ("rank", *kinds), sizes))  # fmt: skip
    said = f"predicted bubble: {step.step.bubble_share:.1%} of a step of {step.step.seconds:.3g} s"
    return "\n".join((*tables, filled(f"{said}\n{best.text()}")))


def _weights_text(found: Any, what: str, ranks: int, step: int) -> str:
    """Return a table, under the title `what`, of the tensors, bytes and files that each of `ranks` ranks reads at the
    load, by the forecast `found`, a WeightsPlan. Each row stands for `step` consecutive ranks: for step = tp all ranks
    of a pipeline stage, for step = 1 one rank.
    """
    from slapo_zoo.weights.ledger import as_table, filled, human

    rows = []
    for i in range(0, len(found.ranks), step):
        group = sorted(found.ranks[i : i + step], key=lambda rank: rank.bytes_read)
        place = f"0..{step - 1}" if step > 1 else str(group[0].tp_coord)
        sizes = dict.fromkeys(human(rank.bytes_read) for rank in (group[0], group[-1]))
        files = len(set().union(*(rank.files for rank in group)))
        rows.append((group[0].stage, place, group[-1].tensors, " .. ".join(sizes), files))
    names = ("stage", "tp", "tensors", "bytes per rank", "files")
    table = as_table(f"{what}, {ranks} ranks", names, rows)
    missing = f"{len(found.missing)} tensors are in no file, {len(found.unexpected)} keys fill no tensor"  # fmt: skip
    sizes = f"model: {human(found.model_bytes)}, read by at least one rank: {human(found.assigned_bytes)}"
    return "\n".join((table, filled(f"{sizes}; {missing}")))
