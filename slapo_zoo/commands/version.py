"""`slapo-zoo version`: what to write into a bug report."""

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

PACKAGES = ("slapo-zoo", "torch", "transformers", "safetensors", "triton", "deepspeed", "xformers")


def show_version() -> None:
    """Print the versions of the package and of what it stands on."""
    typer.echo(f"python {platform.python_version()}")
    for name in PACKAGES:
        try:
            typer.echo(f"{name} {version(name)}")
        except PackageNotFoundError:
            typer.echo(f"{name} -")
