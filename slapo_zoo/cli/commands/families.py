"""`slapo-zoo list`: the families of the zoo."""

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import say, stdout_for_json


def list_families(as_json: AsJson = False) -> None:
    """Print the families that have a table, and what each table offers."""
    with stdout_for_json(as_json):
        from slapo_zoo.weights.ledger import filled
        from slapo_zoo.zoo.features import features

        found = features()
    width = max(map(len, found))
    offered = (" ".join(what for what, yes in has.items() if yes) for has in found.values())
    lines = (f"{name:<{width}}  {text}" for name, text in zip(found, offered, strict=True))
    say(as_json, found, filled("\n".join(lines)))
