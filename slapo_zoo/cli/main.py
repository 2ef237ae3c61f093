"""Entry point of `slapo-zoo`: its commands, and old names of flags."""

import io
import logging
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated

import typer

from slapo_zoo.cli.commands import card
from slapo_zoo.cli.commands.bench import bench
from slapo_zoo.cli.commands.checkpoints import check, reshard
from slapo_zoo.cli.commands.families import derive, list_families, print_version, show_version
from slapo_zoo.cli.commands.init import init
from slapo_zoo.cli.commands.plan import plan
from slapo_zoo.cli.commands.plan_search import calibrate
from slapo_zoo.cli.commands.show import show
from slapo_zoo.cli.commands.train import train
from slapo_zoo.cli.commands.tune import tune
from slapo_zoo.cli.commands.verify import verify
from slapo_zoo.cli.readable_errors import readable_errors
from slapo_zoo.cli.training import options
from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.ranks.slurm import is_first

KEYS = {f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in options.RENAMED.items()}  # fmt: skip
RENAMED = {"plan": {"--dtype": "--precision"}, "train": KEYS}  # old --> new flag, for one release
SETTINGS = {"help_option_names": ["-h", "--help"]}
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=SETTINGS)
app.add_typer(card.app, name="card")
COMMANDS = {
    "list": list_families, "plan": plan, "calibrate": calibrate, "show": show, "reshard": reshard, "check": check,
    "init": init, "train": train, "bench": bench, "tune": tune, "verify": verify, "derive": derive, "version": show_version,
}  # fmt: skip
for name, work in COMMANDS.items():
    app.command(name)(work)


@app.command("demo", hidden=True, context_settings=ANYTHING)
@app.command("coverage", hidden=True, context_settings=ANYTHING)
def moved(context: typer.Context) -> None:
    """Raise an error for a removed command, which `context` names: ci/run.py has a command of the same name."""
    hint = f"in a checkout of the source: python3 ci/run.py {context.info_name}"
    raise SlapoError("slapo-zoo", str(context.info_name), "this command was removed", hint)


@app.callback()
def shared(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    local_rank: Annotated[
        int, typer.Option("--local_rank", hidden=True)
    ] = 0,  # passed by the deepspeed launcher
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print it.")
    ] = False,
) -> None:
    """Train, plan and check tensor-, pipeline- and data-parallel HuggingFace models. These flags precede the command."""
    context.obj.debug = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (None: sys.argv); print expected errors without a traceback."""
    state = SimpleNamespace(debug=False)
    logging.getLogger("DeepSpeed").addFilter(_away_from_stdout)
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # closed, as by some schedulers of jobs
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):  # it may lack letters of a path
            stream.reconfigure(errors="backslashreplace")
    with readable_errors(state):
        app(renamed(sys.argv[1:] if arguments is None else arguments), obj=state)


def renamed(arguments: Sequence[str]) -> list[str]:
    """Return command-line `arguments` with old names of flags replaced by current ones; print a warning for each.
    Underscores in flags become hyphens, because scripts for transformers write `--max_steps`. For a flag of
    transformers that `train` replaces by another one (--num_train_epochs by --max-steps), SlapoError names the latter.
    """
    command, found = next((word for word in arguments if word[:1] != "-"), ""), []
    for word in arguments:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name[:2] == "--" and name != "--local_rank" else name
        other = options.ELSEWHERE.get(name[2:].replace("-", "_")) if command == "train" else None
        if other is not None and name[:2] == "--":
            raise SlapoError(command, name, "found no such option", f"use {other}")
        new = RENAMED.get(command, {}).get(name, name)
        if new != name and is_first():
            sys.stderr.write(f"warning: {command}: {name} is called {new} now\n")
        found.append(f"{new}{equals}{value}")
    return found


def _away_from_stdout(record: logging.LogRecord) -> bool:
    """Return False, which drops a log record of DeepSpeed, for "Setting accelerator to CPU", else True. Called as a
    logging filter for each record, it first makes DeepSpeed's log handlers write to stderr instead of stdout.
    """
    for handler in logging.getLogger(record.name).handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return "Setting accelerator to CPU" not in record.getMessage()


if __name__ == "__main__":
    main()
