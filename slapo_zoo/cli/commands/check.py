"""`slapo-zoo check`: is every byte of a checkpoint still what was saved?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from slapo_zoo.cli.arguments import AsJson


def check(
    folder: Annotated[Path, typer.Argument(help="What save_pretrained or save_checkpoint wrote.")],
    as_json: AsJson = False,
) -> None:
    """Compare every tensor and file of a checkpoint with its checksums; exit code 2 names damages."""
    from slapo_zoo.cli.readable_errors import report, stdout_for_json
    from slapo_zoo.weights.integrity import damages_of

    with stdout_for_json(as_json):
        count, found = damages_of(folder)
    if as_json:
        damages = [{"tensor": str(error.what), "problem": error.problem} for error in found]
        typer.echo(json.dumps({"folder": str(folder), "tensors": count, "damages": damages}))
        raise typer.Exit(2 if found else 0)
    for error in found:
        report(error)
    if found:
        raise typer.Exit(2)
    typer.echo(f"{folder}: {count} tensors are what was saved")
