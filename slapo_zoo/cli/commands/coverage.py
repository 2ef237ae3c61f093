"""`slapo-zoo coverage`: which model types of `transformers` train equal to the plain model."""

from pathlib import Path
from typing import Annotated

import typer


def coverage(
    model_types: Annotated[
        list[str] | None, typer.Argument(help="None: all that are not in the file yet.")
    ] = None,
    file: Annotated[Path, typer.Option(help="Outcomes so far, as JSON lines.")] = Path(
        "coverage.jsonl"
    ),
    page: Annotated[Path | None, typer.Option(help="Write docs/coverage.md there.")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="tp2, pp2, 'tp2 pp2', 'tp2 sp'; none: all of them.")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Seconds per type.")] = 240,
) -> None:
    """Try every model type, tiny, on tp2, pp2, tp2 with pp2, and tp2 with sequence parallelism."""
    from slapo_zoo.verify import coverage as measured

    def tell(outcome: measured.Outcome) -> None:
        typer.echo(f"{outcome.model_type}: {outcome.problem or outcome.layouts}")

    found = list(
        measured.cover(model_types or [], file, timeout, layout or list(measured.LAYOUTS), tell)
    )
    if page is not None:
        page.write_text(measured.page(found), encoding="utf-8")
