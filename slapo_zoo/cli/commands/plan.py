"""`slapo-zoo plan`: what every rank would read, compute and hold, before any is started."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import (
    AsJson,
    CheckpointPolicy,
    CheckpointRatio,
    Dp,
    DpShard,
    Order,
    PipelineRanks,
    SequenceParallel,
    StagesPerRank,
    Tp,
    ZeroStage,
)
from slapo_zoo.cli.readable_errors import stdout_for_json

Model = Annotated[str, typer.Argument(help="A checkpoint folder, a Hub id, or with --gpus a family.")]  # fmt: skip
Weights = Annotated[bool | None, typer.Option("--weights/--no-weights", help="What is read of the files, alone.")]  # fmt: skip
Training = Annotated[
    bool | None, typer.Option("--training/--no-training", help="Cost and memory of a step, alone.")
]
SEARCH = "With --gpus"


def plan(
    model: Model,
    weights: Weights = None,
    training: Training = None,
    tp: Tp = 1,
    pp: PipelineRanks = 1,
    dp: Dp = 1,
    sequence_parallel: SequenceParallel = False,
    dp_shard: DpShard = 1,
    zero_stage: ZeroStage = 3,
    every_rank: Annotated[bool, typer.Option(help="A line per rank, not per stage.")] = False,
    pipeline_order: Order = "1f1b",
    stages_per_rank: StagesPerRank = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Per step; 2 * pp.")] = None,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 1,
    seq_len: Annotated[int | None, typer.Option("--seq-len", "--seq", min=1, help="Tokens per row.")] = None,
    checkpoint_ratio: CheckpointRatio = 0.0,
    checkpoint_policy: CheckpointPolicy = "",
    gpus: Annotated[int | None, typer.Option(min=1, help="Search: which layout of so many?")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a device, e.g. 80GiB.", rich_help_panel=SEARCH)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step, all copies.", rich_help_panel=SEARCH)] = 1024,
    hardware: Annotated[str, typer.Option(help="h200, h100, a100, a100-40g, v100, cpu, or a file of calibrate.")] = "a100",
    precision: Annotated[str, typer.Option(help="bf16, fp16 (sums in fp32), bf16-pure, fp16-pure or fp32.")] = "bf16",
    runtime: Annotated[str, typer.Option(help="eager, kernels, compiled or megatron: how it is run.")] = "eager",
    explain: Annotated[bool, typer.Option(help="Why others do not fit.", rich_help_panel=SEARCH)] = False,
    as_json: AsJson = False,
    write: Annotated[Path | None, typer.Option(help="The winner's schedule.json.", rich_help_panel=SEARCH)] = None,
    most: Annotated[int, typer.Option("--top", min=1, help="Layouts shown.", rich_help_panel=SEARCH)] = 10,
) -> None:  # fmt: skip
    """Print what each rank would read, compute and hold; no weight is read.

    With --gpus, look at every layout of a cluster instead, and name the fastest that fits.
    """
    from slapo_zoo.errors import MeshError

    device = (hardware, memory, precision, runtime)
    if gpus is None and (write or explain):
        what = "--write" if write else "--explain"
        raise MeshError("plan", what, "it belongs to a search, found none", "add --gpus N")
    if gpus is not None:
        if (tp, pp, dp) != (1, 1, 1):
            problem = f"found tp={tp} pp={pp} dp={dp}, but a search tries every layout"
            raise MeshError("plan", f"--gpus {gpus}", problem, "leave out one or the other")
        from slapo_zoo.cli.commands.plan_search import search

        search(model, gpus, batch, seq_len, device, explain, as_json, write, most)
        return
    with stdout_for_json(as_json):
        from slapo_zoo.zoo.load_forecast import plan_weights

        both = not weights and not training  # neither is asked for by name
        read = plan_weights(model, tp, pp, dp) if weights or (both and weights is None) else None
        step = None
        if training or (both and training is None):
            mesh, sizes = (tp, pp, dp), (micro_batches, micro_batch_size, seq_len)
            knobs = {"sequence_parallel": sequence_parallel, "dp_shard": dp_shard, "zero_stage": zero_stage,
                     "checkpoint_ratio": checkpoint_ratio, "checkpoint_policy": checkpoint_policy}  # fmt: skip
            step = _forecast(model, mesh, (pipeline_order, stages_per_rank), sizes, device, knobs)
    if as_json:
        typer.echo(json.dumps({"weights": _weights_data(read), "training": _step_data(step)}, indent=1))  # fmt: skip
        return
    if read is not None:
        _print_weights(read, f"{model}: tp={tp} pp={pp} dp={dp}", 1 if every_rank else tp)
    if step is not None:
        _print_forecast(step, pipeline_order)


def _forecast(
    model: str, mesh: tuple[int, int, int], order: tuple[str, int | None],
    sizes: tuple[int | None, int, int | None], device: tuple[str, str | None, str, str],
    knobs: dict[str, Any],
) -> Any:  # fmt: skip
    """Forecast a step of one layout.

    Args:
        model: as of `make_planner`.
        mesh: tp, pp and dp.
        order: name of the pipeline order, and its stages per rank.
        sizes: micro-batches, rows of one, tokens of a row.
        device: as of `make_planner`.
        knobs: of the layout.
    """
    from slapo_zoo.cli.commands.plan_search import make_planner
    from slapo_zoo.model.dp.dp_shard import check_dp_shard
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.pipeline.orders import StageMap
    from slapo_zoo.tune.forecast import forecast
    from slapo_zoo.tune.planner.layout import Layout

    count, rows, seq_len = sizes
    tp, pp, dp = mesh
    check_dp_shard(Mesh(tp, pp, dp), knobs["dp_shard"], None, None)
    places = StageMap.make(order[0], pp, order[1])
    count = count or (places.custom.micro_batches if places.custom else max(1, 2 * (pp > 1) * pp))
    layout = Layout(tp, pp, dp, rows, count, order[0], places.per_rank, **knobs)
    from slapo_zoo.tune.planner.layout_report import worth

    planner = make_planner(model, seq_len, device)
    found, stages = forecast(planner, layout)
    return found, stages, worth(planner, found), planner.hardware.name


def _weights_data(found: Any) -> dict[str, Any] | None:
    """Return the reads of all ranks as plain data, in bytes; None where they were not asked for."""
    if found is None:
        return None
    ranks = [{**vars(rank), "files": sorted(rank.files)} for rank in found.ranks]
    return {
        "ranks": ranks, "model_bytes": found.model_bytes, "assigned_bytes": found.assigned_bytes,
        "missing": found.missing, "unexpected": found.unexpected,
    }  # fmt: skip


def _step_data(found: Any) -> dict[str, Any] | None:
    """Return a step's forecast as plain data, in bytes and seconds; None where it was not asked for."""
    if found is None:
        return None
    step, stages, best, hardware = found
    ranks = [{"rank": i, **vars(rank)} for i, rank in enumerate(step.ranks)]
    return {
        "micro_batches": step.layout.micro_batches, "stages": [vars(stage) for stage in stages],
        "ranks": ranks, "bubble": step.step.bubble, "step": vars(step.step),
        "worth": vars(best), "hardware": hardware,
    }  # fmt: skip


def _print_forecast(found: Any, order: str) -> None:
    from slapo_zoo.weights.ledger import as_table, filled, human

    step, parts, best, hardware = found
    whole = sum(stage.seconds for stage in parts)
    title = f"a step of {step.layout.micro_batches} micro-batches, order {order}, on {hardware} (--hardware)"
    names = ("stage", "rank", "units", "seconds of a micro-batch", "of the model", "activations of a micro-batch")  # fmt: skip
    stages = [(i, stage.rank, stage.extent, f"{stage.seconds:.3g}", f"{stage.seconds / whole:.1%}",
               human(round(stage.activations))) for i, stage in enumerate(parts)]  # fmt: skip
    typer.echo(as_table(title, names, stages))
    kinds = ("weights", "gradients", "optimizer", "activations", "working", "buffers", "total")
    sizes = [(i, *(human(round(getattr(r, k))) for k in kinds)) for i, r in enumerate(step.ranks)]
    typer.echo(as_table("most bytes per rank, with AdamW", ("rank", *kinds), sizes))
    said = f"predicted bubble: {step.step.bubble_share:.1%} of a step of {step.step.seconds:.3g} s"
    typer.echo(filled(f"{said}\n{best.text()}"))


def _print_weights(found: Any, what: str, step: int) -> None:
    """Print the reads as a table: a line per group of `step` ranks (a stage, or one rank)."""
    from slapo_zoo.weights.ledger import as_table, filled, human

    rows = []
    for i in range(0, len(found.ranks), step):
        group = sorted(found.ranks[i : i + step], key=lambda rank: rank.bytes_read)
        place = f"0..{step - 1}" if step > 1 else str(group[0].tp_coord)
        sizes = dict.fromkeys(human(rank.bytes_read) for rank in (group[0], group[-1]))
        files = len(set().union(*(rank.files for rank in group)))
        rows.append((group[0].stage, place, group[-1].tensors, " .. ".join(sizes), files))
    names = ("stage", "tp", "tensors", "bytes per rank", "files")
    typer.echo(as_table(f"{what}, {found.mesh.world_size} ranks", names, rows))
    typer.echo(filled(
        f"model: {human(found.model_bytes)}, of it assigned: {human(found.assigned_bytes)}; "
        f"{len(found.missing)} tensors are in no file, {len(found.unexpected)} keys have no place"
    ))  # fmt: skip
