"""`slapo-zoo list`: the families of the zoo."""

import json
from typing import Annotated

import typer

from slapo_zoo.cli.errors import stdout_for_json


def list_families(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the families that have a table, and what each table offers."""
    with stdout_for_json(as_json):
        from slapo_zoo.zoo.features import features

        found = features()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    width = max(map(len, found))
    for name, has in found.items():
        typer.echo(f"{name:<{width}}  {' '.join(feature for feature, yes in has.items() if yes)}")
