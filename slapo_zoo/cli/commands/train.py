"""Command `slapo-zoo train`: trains a user's checkpoint on the user's data, on any mesh."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from slapo_zoo.cli.arguments import LAYOUT, MESH, command
from slapo_zoo.cli.training import options as config_keys
from slapo_zoo.cli.training.options import KINDS, LEAST, TrainOptions
from slapo_zoo.parallel.ranks.slurm import is_first

Model = Annotated[str | None, typer.Argument(help="A checkpoint folder, or the id of a model on the Hub.")]  # fmt: skip
Config = Annotated[Path | None, typer.Option(help="A YAML file of the keys of docs/training.md.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="One key of that file, e.g. warmup_steps=100.")]  # fmt: skip
ABOUT = config_keys.described()
# flag --> its annotation and default: every key but sizes of the mesh (LAYOUT), mappings and lists (--set)
KEYS = {
    field.name: (
        Annotated[KINDS[field.name], typer.Option(help=ABOUT[field.name], min=LEAST.get(field.name))],
        field.default,
    )
    for field in fields(TrainOptions)
    if field.name not in ("model", *MESH) and get_origin(KINDS[field.name]) not in (tuple, Mapping)
}  # fmt: skip
EXACT = {"exact": (Annotated[str, typer.Option(help=ABOUT["exact"], metavar="tp=4,dp=2")], "")}
DP = {
    "dp": (Annotated[int, typer.Option(help=ABOUT["dp"], min=1)], None)
}  # only here it may be left to the launcher
OF_LOAD = {name: flag for name, flag in LAYOUT.items() if name not in MESH}


def train(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    sets: Sets = None,
    **flags: Any,
) -> Any:
    """Train a checkpoint on your data: next tokens, masked tokens, labels, pairs, ...

    Options come from a YAML file (--config), from --set KEY=VALUE and from flags; a later one of these three wins.
    Under torchrun, srun or the deepspeed launcher the command joins their processes; otherwise it
    starts tp * pp * dp * cp local ranks.
    Losses are the same on any mesh, and a checkpoint can be resumed on any other mesh.
    SIGTERM, SIGUSR1 and Ctrl-C finish the step and save; the exit code is then 75, or 130 for Ctrl-C.
    With --json the losses of the steps of this run are printed at the end.
    """
    named = {"model": model, **flags}
    is_said = lambda name: getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"  # noqa: E731
    given = {name: value for name, value in named.items() if is_said(name)}
    if knobs := {name: given.pop(name) for name in OF_LOAD if name in given}:
        given["load"] = knobs
    options = config_keys.make_options(
        config_keys.read_config(config) if config is not None else {},
        config_keys.read_sets(sets or []), config_keys.checked(given, "train"),
    )  # fmt: skip
    losses = trained(options)
    places = {name: getattr(options, name) for name in ("output", "checkpoint", "best", "log_file")}
    return ({"losses": losses, **places}, "") if is_first() else None


def trained(options: TrainOptions) -> list[float]:
    """Check the options, read model and data, and train; return each step's mean loss over its batch."""
    if is_first():
        typer.echo(
            f"{config_keys.changes(options)}\nreading model and data ..."
        )  # imports take seconds

    from slapo_zoo.cli.training.checks import check_checkpoint, resolved
    from slapo_zoo.cli.training.inputs import read_inputs
    from slapo_zoo.cli.training.run import run

    options, model_config = resolved(options)
    inputs = read_inputs(options, model_config)
    if is_first():
        kept = options.output or options.checkpoint or options.best
        alone = "" if kept else "\nwithout output, checkpoint or best nothing that is learned is kept"  # fmt: skip
        typer.echo(f"{inputs.summary()}; loading the model ...{alone}")
    if options.checkpoint is not None:
        check_checkpoint(Path(options.checkpoint), inputs.batches.position(0), options)
    return run(options, inputs)


train = command(train, {**KEYS, **EXACT, **LAYOUT, **DP})
