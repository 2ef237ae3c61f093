"""`slapo-zoo list`: the families of the zoo."""

import json

import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.errors import stdout_for_json


def list_families(as_json: AsJson = False) -> None:
    """Print the families that have a table, and what each table offers."""
    with stdout_for_json(as_json):
        from slapo_zoo.weights.ledger import filled
        from slapo_zoo.zoo.features import features

        found = features()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    width = max(map(len, found))
    for name, has in found.items():
        offers = " ".join(feature for feature, yes in has.items() if yes)
        typer.echo(filled(f"{name:<{width}}  {offers}"))
