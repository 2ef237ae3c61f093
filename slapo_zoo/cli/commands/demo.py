"""`slapo-zoo demo`: the main job on a model that is made on the spot."""

import json
from typing import Annotated

import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.errors import stdout_for_json


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 40,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT-2 on four ranks beside one process, and compare every loss."""
    with stdout_for_json(as_json):
        from slapo_zoo.cli.demo import compared

        alone, beside, agree = compared(steps)
    if as_json:
        found = {"one_process": alone, "four_processes": beside, "agree": agree}
        typer.echo(json.dumps(found, indent=1))
    raise typer.Exit(0 if agree else 1)
