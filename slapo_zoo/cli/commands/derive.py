"""`slapo-zoo derive`: a table for a family that has none, proven, as source."""

from pathlib import Path
from typing import Annotated

import typer

from slapo_zoo.cli.arguments import AsJson, Model
from slapo_zoo.cli.readable_errors import say, stdout_for_json
from slapo_zoo.cli.waiting import waiting


def derive(
    model: Model,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the proof.")] = 2,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of the proof.")] = 1,
    auto_class: Annotated[str | None, typer.Option("--auto-class", help="Which head.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write schedules/<model_type>.py.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Derive a table from a model's modules, prove it on a tiny model of that config, print its source.

    The proof compares outputs, loss and every gradient with plain `transformers`, all ranks as
    threads on the CPU. What could not be sharded is said, and why.
    """
    from slapo_zoo.hf import models as hf
    from slapo_zoo.verify.derive import derive as prove
    from slapo_zoo.zoo.argument_values import config_of, usual_head
    from slapo_zoo.zoo.derivation.source import to_source

    with stdout_for_json(as_json):
        config, head = config_of(model)
        cls = hf.resolve_class(config, auto_class or usual_head(config, head))
        with waiting(f"derive {model} tp={tp} pp={pp}"):
            proof = prove(config, cls, (tp, pp, 1))
    source = to_source(proof.open_table, proof.per_rank)
    words = [source, *(f"# {line}" for line in proof.words())]
    say(as_json, {**proof.document(), "source": source}, "\n".join(words))
    if write:
        file = Path(__file__).parents[2] / "schedules" / f"{config.model_type}.py"
        file.write_text(source, encoding="utf-8")
        typer.echo(
            err=as_json,
            message=f"# written: {file.name}; now its golden file and its tests (CONTRIBUTING.md)",
        )
