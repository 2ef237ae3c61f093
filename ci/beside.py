"""Compare training steps with other libraries on the CPU: `ci/run.py beside MODEL REPORT [--tp 2]`.

Steps take turns. Exit status 1: slapo_zoo did not compute the losses of plain transformers.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from compare.run import side_by_side, write_report
from compare.shapes import Work

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import readable_errors, stdout_for_json
from slapo_zoo.cli.training.checks import row_length
from slapo_zoo.zoo.argument_values import checkpoint_config, local_folder


def beside(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or a model id of the Hub.")],
    report: Annotated[Path, typer.Argument(help="Folder of side.json, side.md and side.png.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks that shard the model.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per row; default: 128, or what the model takes.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time training steps of a checkpoint, in turns with plain transformers and other libraries that shard it."""
    with stdout_for_json(as_json):
        place = str(local_folder(model, None, False))
        tokens = row_length(seq_len, checkpoint_config(model))
        found = side_by_side(Work(place, batch_size, tokens, tp=tp), steps)
        command = f"ci/run.py beside {model} {report} --tp {tp} --batch-size {batch_size}"
        write_report({model: found}, report, f"{command} --seq-len {tokens} --steps {steps}")
    text = json.dumps(found, indent=1) if as_json else (report / "side.md").read_text("utf-8")
    typer.echo(text)
    raise typer.Exit(0 if found["green"] else 1)


if __name__ == "__main__":
    with readable_errors():
        typer.run(beside)
