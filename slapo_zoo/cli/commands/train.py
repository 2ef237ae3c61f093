"""`slapo-zoo train`: a person's own checkpoint and data, on any mesh."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from slapo_zoo.cli import arguments
from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import is_first, stdout_for_json
from slapo_zoo.cli.training.options import KINDS, LEAST, TrainOptions, described

Model = Annotated[str | None, typer.Argument(help="A checkpoint folder, or the id of a model on the Hub.")]  # fmt: skip
Config = Annotated[Path | None, typer.Option(help="A YAML file of the keys of docs/training.md.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A key of it, e.g. warmup_steps=100.")]  # fmt: skip

ABOUT = described()
# flag --> its annotation and default: every key that is no mapping and no list, which are given by --set
KEYS = {
    field.name: (
        Annotated[KINDS[field.name], typer.Option(help=ABOUT[field.name], min=LEAST.get(field.name))],
        field.default,
    )
    for field in fields(TrainOptions)
    if field.name != "model" and get_origin(KINDS[field.name]) not in (tuple, Mapping)
}  # fmt: skip
OF_LOAD = {
    "sequence_parallel": (arguments.SequenceParallel, False), "dp_shard": (arguments.DpShard, 1),
    "zero_stage": (arguments.ZeroStage, 3),
    "pipeline_order": (arguments.Order, "1f1b"), "stages_per_rank": (arguments.StagesPerRank, None),
    "checkpoint_ratio": (arguments.CheckpointRatio, 0.0), "checkpoint_policy": (arguments.CheckpointPolicy, ""),
}  # fmt: skip


def with_flags(command: Any) -> Any:
    """Give the command a flag for every key, and for the knobs of a layout, which are entries of `load`."""
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in {**KEYS, **OF_LOAD}.items()
    ]
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = inspect.Signature([*own, *flags])
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
    return command


@with_flags
def train(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    sets: Sets = None,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Train a checkpoint on your data: next tokens, masked tokens, labels, pairs, ...

    What to do is written in a file (--config), in flags, or in both: flags win, then --set.
    Under torchrun, srun or the deepspeed launcher the command joins their processes; otherwise it
    starts tp * pp * dp local ranks.
    Any number of them computes the same losses, and resumes from a checkpoint of any other.
    SIGTERM, SIGUSR1 and Ctrl-C finish the step and save; the exit code is then 75, or 130.
    With --json the losses of the steps that were done are printed at the end.
    """
    from slapo_zoo.cli.training.options import checked, make_options, read_config, read_sets

    given = read_config(config) if config is not None else {}
    options = make_options(given, read_sets(sets or []), checked(_flags(context), "train"))
    with stdout_for_json(as_json):
        losses = _train(options)
    if as_json and is_first():
        places = {
            name: getattr(options, name) for name in ("output", "checkpoint", "best", "log_file")
        }
        typer.echo(json.dumps({"losses": losses, **places}, indent=1))


def _train(options: TrainOptions) -> list[float]:
    """Check, read, train; the losses of the steps that were done."""
    from slapo_zoo.cli.training.options import changes

    if is_first():
        typer.echo(f"{changes(options)}\nreading model and data ...")  # imports take seconds

    from slapo_zoo.cli.training.checks import check_checkpoint, resolved
    from slapo_zoo.cli.training.inputs import read_inputs
    from slapo_zoo.cli.training.run import run

    options, model_config = resolved(options)
    inputs = read_inputs(options, model_config)
    if is_first():
        kept = options.output or options.checkpoint or options.best
        alone = (
            "" if kept else "\nwithout output, checkpoint or best nothing that is learned is kept"
        )
        typer.echo(f"{inputs.summary()}; loading the model ...{alone}")
    if options.checkpoint is not None:
        check_checkpoint(Path(options.checkpoint), inputs.batches.position(0), options)
    return run(options, inputs)


def _flags(context: typer.Context) -> dict[str, Any]:
    """Return the options that were given on the command line, by name."""
    given = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in ("config", "sets", "as_json"):
            continue
        if name in OF_LOAD:
            given.setdefault("load", {})[name] = value
        else:
            given[name] = value
    return given
