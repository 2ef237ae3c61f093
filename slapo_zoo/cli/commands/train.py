"""`slapo-zoo train`: a person's own checkpoint and data, on any mesh."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import AsJson, Device, DpOrAll, MicroBatches, Pp, Tp
from slapo_zoo.cli.errors import is_first, stdout_for_json
from slapo_zoo.cli.training.options import TrainOptions

Model = Annotated[str | None, typer.Argument(help="A checkpoint folder, or the id of a model on the Hub.")]  # fmt: skip
Config = Annotated[Path | None, typer.Option(help="A YAML file of the keys of docs/training.md.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A key of it, e.g. warmup_steps=100.")]  # fmt: skip
Data = Annotated[str | None, typer.Option(help="A file, a folder, or a dataset of the Hub.")]
Engine = Annotated[str, typer.Option(help="torch, deepspeed or megatron.", metavar="NAME")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Checkpoint folder; training resumes from it if it exists.")
]
Device = Device
DEFAULT = TrainOptions("")


def train(
    context: typer.Context,
    model: Model = None,
    config: Config = None,
    sets: Sets = None,
    data: Data = None,
    tp: Tp = DEFAULT.tp,
    pp: Pp = DEFAULT.pp,
    dp: DpOrAll = DEFAULT.dp,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = DEFAULT.steps,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step, all copies together.")] = DEFAULT.batch_size,
    micro_batches: MicroBatches = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per row; none: 128, or what the model takes.")] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Of AdamW; none: 1e-4, or that of the checkpoint.")] = None,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm; 0: no limit.")] = DEFAULT.clip,
    seed: Annotated[int, typer.Option(help="Of dropout, order and masks.")] = DEFAULT.seed,
    output: Annotated[Path | None, typer.Option(help="Folder for the trained checkpoint.")] = None,
    checkpoint: Checkpoint = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = DEFAULT.save_every,
    keep: Annotated[int | None, typer.Option(min=1, help="Keep so many checkpoints, in step folders; `last` links one.")] = None,
    device: Device = "auto",
    engine: Engine = DEFAULT.engine,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="Of DeepSpeed's ZeRO.")] = DEFAULT.zero_stage,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a checkpoint on your data: next tokens, masked tokens, labels, pairs, ...

    What to do is written in a file (--config), in flags, or in both: flags win, then --set.
    Under torchrun, srun or the deepspeed launcher the command joins their processes; otherwise it
    starts tp * pp * dp local ranks.
    Any number of them computes the same losses, and resumes from a checkpoint of any other.
    SIGTERM, SIGUSR1 and Ctrl-C finish the step and save; the exit code is then 75, or 130.
    With --json the losses of the steps that were done are printed at the end.
    """
    from slapo_zoo.cli.training.config import checked, make_options, read_config, read_sets

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
    from slapo_zoo.cli.training.config import changes

    if is_first():
        typer.echo(f"{changes(options)}\nreading model and data ...")  # imports take seconds

    from slapo_zoo.cli.training import job
    from slapo_zoo.cli.training.inputs import read_inputs

    options, model_config = job.resolved(options)
    inputs = read_inputs(options, model_config)
    if is_first():
        kept = options.output or options.checkpoint or options.best
        alone = (
            "" if kept else "\nwithout output, checkpoint or best nothing that is learned is kept"
        )
        typer.echo(f"{inputs.summary()}; loading the model ...{alone}")
    if options.checkpoint is not None:
        job.check_checkpoint(Path(options.checkpoint), inputs.batches, options)
    return job.run(options, inputs)


def _flags(context: typer.Context) -> dict[str, Any]:
    """Return the options that were given on the command line, by name."""
    given = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in ("config", "sets", "as_json"):
            continue
        given[name] = str(value) if isinstance(value, Path) else value
    return given
