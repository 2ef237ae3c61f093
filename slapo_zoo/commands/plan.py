"""`slapo-zoo plan`: what every rank would read, before any is started."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A checkpoint folder, or the id of a model on the Hub.")]
Weights = Annotated[bool, typer.Option("--weights", help="Plan the reading of the weights.")]


def plan(
    model: Model,
    weights: Weights = True,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Copies of the model.")] = 1,
    every_rank: Annotated[bool, typer.Option(help="A line per rank, not per stage.")] = False,
) -> None:
    """Print what each rank would read; only headers are read, no weight."""
    from rich.console import Console
    from rich.table import Table

    from slapo_zoo.plan import plan_weights
    from slapo_zoo.weights.ledger import human

    found = plan_weights(model, tp, pp, dp)
    title = f"{model}: tp={tp} pp={pp} dp={dp}, {found.mesh.world_size} ranks"
    table = Table("stage", "tp", "tensors", "bytes per rank", "files", title=title)
    step = 1 if every_rank else tp
    for i in range(0, len(found.ranks), step):
        group = found.ranks[i : i + step]
        group.sort(key=lambda rank: rank.bytes_read)
        sizes = dict.fromkeys(human(rank.bytes_read) for rank in (group[0], group[-1]))
        place = str(group[0].tp_coord) if every_rank else f"0..{tp - 1}"
        files = str(len(set().union(*(rank.files for rank in group))))
        table.add_row(str(group[0].stage), place, str(group[-1].tensors), " .. ".join(sizes), files)
    Console(highlight=False).print(table)
    typer.echo(
        f"model: {human(found.model_bytes)}, of it assigned: {human(found.assigned_bytes)}; "
        f"{len(found.missing)} tensors are in no file, {len(found.unexpected)} keys have no place"
    )
