"""Command `slapo-zoo card`: makes, checks, compares, publishes and downloads cards (published ways to shard a model)."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import (
    CheckpointRatio,
    Cp,
    Dp,
    Head,
    Model,
    Pp,
    SequenceParallel,
    Tp,
    command,
    table_of_cut,
)
from slapo_zoo.cli.waiting import waiting

app = typer.Typer(no_args_is_help=True, help="Schedule cards: a schedule as data, to share.")
Name = Annotated[str, typer.Argument(help="A card: a folder, or org/name@revision.")]
Folder = Annotated[Path, typer.Argument(help="The folder of a card.")]


@app.command()
@command
def make(
    model: Model,
    folder: Folder,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    sequence_parallel: SequenceParallel = False,
    checkpoint_ratio: CheckpointRatio = 0.0,
    any_size: Annotated[
        bool, typer.Option(help="Accept models of every size with the same number of blocks.")
    ] = False,
    auto_class: Head = None,
    cp: Cp = 1,
) -> Any:
    """Write a card: a folder to publish, with the schedule by which slapo_zoo shards a model. Of the model only the
    config is read. --auto-class names the class of the model's head, by default the one in the config.
    """
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.weights.ledger import filled
    from slapo_zoo.zoo.argument_values import config_of
    from slapo_zoo.zoo.cards.make import zoo_card

    config, head = config_of(model)
    knobs = {"sequence_parallel": sequence_parallel, "checkpoint_ratio": checkpoint_ratio}
    mesh = Mesh(tp, pp, dp, cp=cp)
    table_of_cut("card make", mesh, config, auto_class or head, knobs)
    card = zoo_card(config, auto_class or head, mesh, model, any_size=any_size, **knobs)
    card.write(folder)
    steps, digest = len(card.program.steps), card.program.hash
    facts = {"folder": folder, "steps": steps, "hash": digest}
    return facts, filled(f"{folder}: {steps} steps, {digest}")


@app.command()
@command
def lint(card: Name) -> Any:
    """Check that a card (a published schedule) has all files, and they are well formed; exit code 2 if not."""
    from slapo_zoo.weights.ledger import filled
    from slapo_zoo.zoo.cards.resolve_card import load_card

    found = load_card(card)
    lines = [f"{card}: {len(found.program.steps)} steps, {found.program.hash}",
             *(f"needs {text}" for text in found.program.constraints)]  # fmt: skip
    return found.metadata()["schedule"], filled("\n".join(lines))


@app.command()
@command
def verify(
    folder: Folder,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or Hub id; default: the card's base model.")] = None,
    full: Annotated[bool, typer.Option(help="Verify the full model, not a small one.")] = False,
) -> Any:  # fmt: skip
    """Compare a model sharded by a card (a schedule) with the plain one; write verify.json; exit code 1 if they differ."""
    from slapo_zoo.errors import CardError
    from slapo_zoo.verify.card_check import verify_card
    from slapo_zoo.zoo.argument_values import config_of
    from slapo_zoo.zoo.cards.card import read_card
    from slapo_zoo.zoo.cards.program import MODULE

    with waiting(f"card verify {folder}"):
        card = read_card(folder)
        if card.program.model_type == MODULE:
            problem = "the card is for a user's own module, which only that user's program can build"  # fmt: skip
            hint = "verify it in that program: with slapo_zoo.Verify(sch, [x]): sch.replay(...) (docs/verification.md)"
            raise CardError("card verify", str(folder), problem, hint)
        config, _ = config_of(model or card.base_model)
        found = verify_card(folder, config, quick=not full)
    text = found.pop("text")
    return found, text, int(found["verdict"] != "verified")


@app.command()
@command
def diff(card: Name, other: Annotated[str, typer.Argument(help="Another card.")]) -> Any:
    """Print how two cards (published schedules) change the modules of one model class differently, as a unified diff."""
    from slapo_zoo.errors import CardError
    from slapo_zoo.zoo.cards.resolve_card import load_card

    programs = [load_card(name).program for name in (card, other)]
    if programs[0].model_class != programs[1].model_class:
        classes = " and ".join(program.model_class for program in programs)
        problem = f"found cards for {classes}, expected one model class"
        raise CardError("card diff", "class", problem, "compare two cards of one class")
    text = programs[0].diff(programs[1], card, other)
    return {"same": not text, "diff": text}, text or "the programs are the same"


@app.command()
@command
def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(help="org/name; created if it does not exist.")],
    tag: Annotated[str | None, typer.Option(help="Tag for the commit.")] = None,
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
    parent: Annotated[
        str | None, typer.Option(help="Commit sha that must be the newest of the repository.")
    ] = None,
) -> Any:
    """Publish a card (a folder with a schedule) on the Hub as one commit, and print the card's reference, org/name@sha."""
    from slapo_zoo.zoo.cards.hub import push

    found = push(folder, repo_id, private=private or None, tag=tag, parent=parent)
    return {"card": found}, str(found)


@app.command()
@command
def pull(
    card: Annotated[str, typer.Argument(help="org/name@revision.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder to copy the card to; default: the cache only.")] = None,
) -> Any:  # fmt: skip
    """Download a card (a published schedule) from the Hub, check it, and print its reference and local folder."""
    from slapo_zoo.zoo.cards.card import read_card
    from slapo_zoo.zoo.cards.hub import Reference, pull

    found = pull(Reference.parse(card))
    checked = read_card(found.folder, found.root)
    if folder is not None:
        checked.write(folder)
    place = folder or found.folder
    return {"card": found.reference, "folder": place}, f"{found.reference} {place}"
