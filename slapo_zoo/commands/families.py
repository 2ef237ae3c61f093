"""`slapo-zoo list`: the families of the zoo."""

import typer


def list_families() -> None:
    """Print the families that have a table, by the `model_type` of their config."""
    from slapo_zoo.zoo import families

    for name in families():
        typer.echo(name)
