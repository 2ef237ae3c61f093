"""`slapo-zoo plan`: what every rank would read, compute and hold, before any is started."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.errors import stdout_for_json

Model = Annotated[
    str, typer.Argument(help="A checkpoint folder, a Hub id, or with --gpus a family.")
]
Weights = Annotated[bool, typer.Option("--weights/--no-weights", help="What is read of the files.")]
Training = Annotated[
    bool, typer.Option("--training/--no-training", help="Cost and memory of a step.")
]
SEARCH = "With --gpus"
Order = Annotated[str, typer.Option(help="Of the pipeline: a name, or a .csv file.")]


def plan(
    model: Model,
    weights: Weights = True,
    training: Training = True,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Copies of the model.")] = 1,
    every_rank: Annotated[bool, typer.Option(help="A line per rank, not per stage.")] = False,
    pipeline_order: Order = "1f1b",
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Per step; 2 * pp.")] = None,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 1,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", "--seq", min=1, help="Tokens per row.")
    ] = None,
    checkpoint_ratio: Annotated[float, typer.Option(help="Share of recomputed blocks.")] = 0.0,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Search: which layout of so many?")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a device, e.g. 80GiB.", rich_help_panel=SEARCH)
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Rows of a step, all copies.", rich_help_panel=SEARCH)
    ] = 1024,
    hardware: Annotated[
        str, typer.Option(help="A name, or a file of calibrate.", rich_help_panel=SEARCH)
    ] = "a100",
    dtype: Annotated[
        str, typer.Option(help="Of the parameters.", rich_help_panel=SEARCH)
    ] = "bfloat16",
    explain: Annotated[
        bool, typer.Option(help="Why others do not fit.", rich_help_panel=SEARCH)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="The winner's schedule.json.", rich_help_panel=SEARCH)
    ] = None,
    most: Annotated[
        int, typer.Option("--top", min=1, help="Layouts shown.", rich_help_panel=SEARCH)
    ] = 10,
) -> None:
    """Print what each rank would read, compute and hold; no weight is read.

    With --gpus, look at every layout of a cluster instead, and name the fastest that fits.
    """
    if gpus is not None:
        from slapo_zoo.cli.commands.plan_search import search

        search(model, gpus, memory, batch, seq_len, hardware, dtype, explain, as_json, write, most)
        return
    with stdout_for_json(as_json):
        read = _weights(model, tp, pp, dp) if weights else None
        step = None
        if training:
            mesh, sizes = (tp, pp, dp), (micro_batches, micro_batch_size, seq_len)
            step = _forecast(model, mesh, pipeline_order, checkpoint_ratio, sizes)
    if as_json:
        typer.echo(
            json.dumps({"weights": _weights_data(read), "training": _step_data(step)}, indent=1)
        )
        return
    if read is not None:
        _print_weights(read, f"{model}: tp={tp} pp={pp} dp={dp}", 1 if every_rank else tp)
    if step is not None:
        _print_forecast(step, pipeline_order)


def _weights(model: str, tp: int, pp: int, dp: int) -> Any:
    from slapo_zoo.zoo.read_plan import plan_weights

    return plan_weights(model, tp, pp, dp)


def _forecast(
    model: str, mesh: tuple[int, int, int], order: str, checkpoint_ratio: float,
    sizes: tuple[int | None, int, int | None],
) -> Any:  # fmt: skip
    """Sizes: micro-batches, rows of one, tokens of a row."""
    from slapo_zoo.pipeline.unit_costs import row_length
    from slapo_zoo.tune.forecast import forecast
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.outline import Outline
    from slapo_zoo.cli.training.job import read_config

    config = read_config(model)
    count, rows, seq_len = sizes
    tokens = row_length(config, seq_len)
    own = getattr(config, "dtype", None) or _float32()
    outline = Outline(
        config, None, Mesh(*mesh), own, pipeline_order=order, checkpoint_ratio=checkpoint_ratio
    )
    custom, pp = outline.places.custom, mesh[1]
    count = count or (custom.micro_batches if custom else max(1, 2 * (pp > 1) * pp))
    return forecast(outline, count, rows, tokens)


def _weights_data(found: Any) -> dict[str, Any] | None:
    """Sizes in bytes; None where it was not asked for."""
    if found is None:
        return None
    ranks = [{**vars(rank), "files": sorted(rank.files)} for rank in found.ranks]
    return {
        "ranks": ranks, "model_bytes": found.model_bytes, "assigned_bytes": found.assigned_bytes,
        "missing": found.missing, "unexpected": found.unexpected,
    }  # fmt: skip


def _step_data(found: Any) -> dict[str, Any] | None:
    """Sizes in bytes, costs in operations; None where it was not asked for."""
    if found is None:
        return None
    ranks = [vars(rank) | {"total": rank.total} for rank in found.ranks]
    stages = [vars(stage) | {"step": stage.step} for stage in found.stages]
    return {
        "micro_batches": found.micro_batches, "stages": stages, "ranks": ranks,
        "bubble": found.bubble,
    }  # fmt: skip


def _float32() -> Any:
    import torch

    return torch.float32


def _print_forecast(found: Any, order: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from slapo_zoo.weights.ledger import human

    console = Console(highlight=False, soft_wrap=True)
    whole = sum(stage.step for stage in found.stages)
    title = f"a step of {found.micro_batches} micro-batches, order {order}"
    stages = Table("stage", "rank", "units", "operations of a micro-batch", "of the model",
                   "activations of a micro-batch", title=title)  # fmt: skip
    for i, stage in enumerate(found.stages):
        stages.add_row(str(i), str(stage.rank), stage.extent, f"{stage.step:.3g}",
                       f"{stage.step / whole:.1%}", human(stage.activations))  # fmt: skip
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    ranks = Table("pipeline rank", *names, title="most bytes per rank, with AdamW")
    for rank in found.ranks:
        ranks.add_row(str(rank.rank), *(human(getattr(rank, name)) for name in names))
    for table in (stages, ranks):
        for column in table.columns:
            column.overflow = "fold"  # a narrow terminal breaks names, and shortens none
        console.print(table)
    console.print(f"predicted bubble: {found.bubble:.1%}, transfers not counted")


def _print_weights(found: Any, what: str, step: int) -> None:
    """A line for every `step` ranks, which are those of a stage or each by itself."""
    from rich.console import Console
    from rich.table import Table

    from slapo_zoo.weights.ledger import human

    title = f"{what}, {found.mesh.world_size} ranks"
    table = Table("stage", "tp", "tensors", "bytes per rank", "files", title=title)
    for i in range(0, len(found.ranks), step):
        group = found.ranks[i : i + step]
        place = f"0..{step - 1}" if step > 1 else str(group[0].tp_coord)
        group.sort(key=lambda rank: rank.bytes_read)
        sizes = dict.fromkeys(human(rank.bytes_read) for rank in (group[0], group[-1]))
        files = str(len(set().union(*(rank.files for rank in group))))
        table.add_row(str(group[0].stage), place, str(group[-1].tensors), " .. ".join(sizes), files)
    Console(highlight=False).print(table)
    typer.echo(
        f"model: {human(found.model_bytes)}, of it assigned: {human(found.assigned_bytes)}; "
        f"{len(found.missing)} tensors are in no file, {len(found.unexpected)} keys have no place"
    )
