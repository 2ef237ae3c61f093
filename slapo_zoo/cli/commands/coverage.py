"""`slapo-zoo coverage`: which model types of `transformers` train equal to the plain model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.errors import stdout_for_json


def coverage(
    model_types: Annotated[list[str] | None, typer.Argument(help="None: all that are not in the file yet.")] = None,
    file: Annotated[Path, typer.Option(help="Outcomes so far, as JSON lines.")] = Path("coverage.jsonl"),
    page: Annotated[Path | None, typer.Option(help="Write docs/coverage.md there.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="tp2, pp2, 'tp2 pp2', 'tp2 sp'; none: all of them.")] = None,
    timeout: Annotated[int, typer.Option(help="Seconds per type.")] = 240,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Try every model type, tiny, on tp2, pp2, tp2 with pp2, and tp2 with sequence parallelism."""
    from slapo_zoo.verify import coverage as measured

    def tell(outcome: measured.Outcome) -> None:
        typer.echo(f"{outcome.model_type}: {outcome.problem or outcome.layouts}")

    layouts = layout or list(measured.LAYOUTS)
    with stdout_for_json(as_json):
        found = list(measured.cover(model_types or [], file, timeout, layouts, tell))
    if page is not None:
        page.write_text(measured.page(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps([asdict(outcome) for outcome in found], indent=1))
