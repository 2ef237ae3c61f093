"""`slapo-zoo version`: what to write into a bug report."""

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import say, stdout_for_json

PACKAGES = ("slapo-zoo", "torch", "transformers", "safetensors", "triton", "deepspeed", "xformers")


def show_version(as_json: AsJson = False) -> None:
    """Print the versions of the package and of what it stands on."""
    with stdout_for_json(as_json):
        found = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    say(as_json, found, "\n".join(f"{name} {number or '-'}" for name, number in found.items()))


def print_version(wanted: bool) -> None:
    """`slapo-zoo --version`: the one line that scripts read."""
    if wanted:
        typer.echo(f"slapo-zoo {_version('slapo-zoo') or 'unknown'}")
        raise typer.Exit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
