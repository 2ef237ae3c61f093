"""`slapo-zoo demo`: the main job on a model that is made on the spot."""

from typing import Annotated

import typer


def demo(steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 40) -> None:
    """Train a small GPT-2 on four ranks beside one process, and compare every loss."""
    from slapo_zoo.cli.demo import run

    raise typer.Exit(run(steps))
