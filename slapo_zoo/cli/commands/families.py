"""Commands `slapo-zoo list` (families), `derive` (sharding rules for a new family) and `version`."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import Head, Model, command
from slapo_zoo.cli.waiting import waiting

PACKAGES = ("slapo-zoo", "torch", "transformers", "safetensors", "triton", "deepspeed", "xformers")


@command
def list_families() -> Any:
    """Print the model families that slapo_zoo can shard, and what each supports: tp, pp, sequence_parallel, experts, ..."""
    from slapo_zoo.weights.ledger import filled
    from slapo_zoo.zoo.features import MEANINGS, features

    found = features()
    width = max(map(len, found))
    offered = (" ".join(what for what, yes in has.items() if yes) for has in found.values())
    lines = [f"{name:<{width}}  {text}" for name, text in zip(found, offered, strict=True)]
    legend = (f"{feature}: {meaning}" for feature, meaning in MEANINGS.items())
    return found, filled("\n".join([*lines, "", *legend]))


@command
def derive(
    model: Model,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the proof.")] = 2,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of the proof.")] = 1,
    auto_class: Head = None,
    write: Annotated[bool, typer.Option("--write", help="Write schedules/<model_type>.py.")] = False,
) -> Any:  # fmt: skip
    """Derive the sharding rules of a model family that has none yet, and print them as source of schedules/<family>.py.

    A tiny model of the same config checks the rules (the proof): outputs, loss and every gradient must be, up to
    rounding, those of plain `transformers`; ranks are threads on the CPU. Modules left unsharded are listed with
    reasons. By default the model's head is the one that the config names, or else one that computes a loss.
    """
    from slapo_zoo.hf import models as hf
    from slapo_zoo.verify.derive import derive as prove
    from slapo_zoo.zoo.argument_values import config_of, usual_head
    from slapo_zoo.zoo.derivation.source import to_source

    config, head = config_of(model)
    cls = hf.resolve_class(config, auto_class or usual_head(config, head))
    with waiting(f"derive {model} tp={tp} pp={pp}"):
        proof = prove(config, cls, (tp, pp, 1))
    source = to_source(proof.open_table, proof.per_rank)
    words = [source, *(f"# {line}" for line in proof.words())]
    if write:
        file = Path(__file__).parents[2] / "zoo" / "schedules" / f"{config.model_type}.py"
        file.write_text(source, encoding="utf-8")
        words.append(f"# written: {file.name}; now its golden file and its tests (CONTRIBUTING.md)")
    return {**proof.document(), "source": source}, "\n".join(words)


@command
def show_version() -> Any:
    """Print the versions of slapo-zoo, of Python and of the libraries in use."""
    found = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    return found, "\n".join(f"{name} {number or '-'}" for name, number in found.items())


def print_version(wanted: bool) -> None:
    """Print the line `slapo-zoo VERSION` and exit if `wanted`, the value of the flag `--version`."""
    if wanted:
        typer.echo(f"slapo-zoo {_version('slapo-zoo') or 'unknown'}")
        raise typer.Exit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
