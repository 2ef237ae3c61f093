"""`slapo-zoo card`: make, look at, publish and fetch schedule cards."""

from pathlib import Path
from typing import Annotated

import typer

from slapo_zoo.cli import arguments
from slapo_zoo.cli.readable_errors import say, stdout_for_json
from slapo_zoo.cli.waiting import waiting

app = typer.Typer(no_args_is_help=True, help="Schedule cards: a schedule as data, to share.")
Name = Annotated[str, typer.Argument(help="A card: a folder, or org/name@revision.")]
Folder = Annotated[Path, typer.Argument(help="The folder of a card.")]


@app.command()
def make(
    model: arguments.Model,
    folder: Folder,
    tp: arguments.Tp = 1,
    pp: arguments.Pp = 1,
    dp: arguments.Dp = 1,
    sequence_parallel: arguments.SequenceParallel = False,
    checkpoint_ratio: arguments.CheckpointRatio = 0.0,
    any_size: Annotated[bool, typer.Option(help="For every size with as many blocks.")] = False,
    auto_class: arguments.Head = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Write the zoo's schedule of a model as a card; what was not measured says so."""
    from slapo_zoo.cards.make import zoo_card
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.weights.ledger import filled
    from slapo_zoo.zoo.argument_values import config_of

    with stdout_for_json(as_json):
        config, head = config_of(model)
        card = zoo_card(
            config, auto_class or head, Mesh(tp, pp, dp), model, sequence_parallel=sequence_parallel,
            checkpoint_ratio=checkpoint_ratio, any_size=any_size,
        )  # fmt: skip
        card.write(folder)
    steps, digest = len(card.program.steps), card.program.hash
    facts = {"folder": folder, "steps": steps, "hash": digest}
    say(as_json, facts, filled(f"{folder}: {steps} steps, {digest}"))


@app.command()
def lint(card: Name, as_json: arguments.AsJson = False) -> None:
    """Check a card; nothing of it is executed. Exit code 2 says what is wrong with it."""
    with stdout_for_json(as_json):
        from slapo_zoo.cards.resolve_card import load_card
        from slapo_zoo.weights.ledger import filled

        found = load_card(card)
    lines = [f"{card}: {len(found.program.steps)} steps, {found.program.hash}",
             *(f"needs {text}" for text in found.program.constraints)]  # fmt: skip
    say(as_json, found.metadata()["schedule"], filled("\n".join(lines)))


@app.command()
def verify(
    folder: Folder,
    model: Annotated[str | None, typer.Option(help="A folder or Hub id; none: its base model.")] = None,
    full: Annotated[bool, typer.Option(help="The model as it is, not a small one.")] = False,
    as_json: arguments.AsJson = False,
) -> None:  # fmt: skip
    """Run the schedule of a card against the plain model, and write the outcome into the card."""
    from slapo_zoo.cards.card import read_card
    from slapo_zoo.cards.program import MODULE
    from slapo_zoo.errors import CardError
    from slapo_zoo.verify.card_check import verify_card
    from slapo_zoo.zoo.argument_values import config_of

    with stdout_for_json(as_json), waiting(f"card verify {folder}"):
        card = read_card(folder)
        if card.program.model_type == MODULE:
            problem = "it is for a user's own module, which only that user's program can build"
            hint = "with slapo_zoo.Verify(sch, [x]): sch.replay(...); see docs/verification.md"
            raise CardError("card verify", str(folder), problem, hint)
        config, _ = config_of(model or card.base_model)
        found = verify_card(folder, config, quick=not full)
    text = found.pop("text")
    say(as_json, found, text)
    raise typer.Exit(0 if found["verdict"] == "verified" else 1)


@app.command()
def diff(
    card: Name,
    other: Annotated[str, typer.Argument(help="Another card.")],
    as_json: arguments.AsJson = False,
) -> None:
    """Compare two cards, as a unified diff of their programs."""
    from slapo_zoo.cards.resolve_card import load_card
    from slapo_zoo.errors import CardError

    programs = [load_card(name).program for name in (card, other)]
    if programs[0].model_class != programs[1].model_class:
        classes = " and ".join(program.model_class for program in programs)
        raise CardError("card diff", "class", f"they are for {classes}", "compare two of one class")
    text = programs[0].diff(programs[1], card, other)
    say(as_json, {"same": not text, "diff": text}, text or "the programs are the same")


@app.command()
def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(help="org/name; made when it is not there.")],
    tag: Annotated[str | None, typer.Option(help="A name for the commit.")] = None,
    private: Annotated[bool, typer.Option(help="Of a new repository.")] = False,
    parent: Annotated[str | None, typer.Option(help="The sha it must still be at.")] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Publish a card on the Hub as one commit; prints the reference to write down."""
    from slapo_zoo.cards.hub import push

    with stdout_for_json(as_json):
        found = push(folder, repo_id, private=private or None, tag=tag, parent=parent)
    say(as_json, {"card": found}, str(found))


@app.command()
def pull(
    card: Annotated[str, typer.Argument(help="org/name@revision.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to copy it; none: the cache.")] = None,
    as_json: arguments.AsJson = False,
) -> None:  # fmt: skip
    """Fetch a card and check it; prints the commit that was fetched."""
    from slapo_zoo.cards.card import read_card
    from slapo_zoo.cards.hub import Reference, pull

    with stdout_for_json(as_json):
        found = pull(Reference.parse(card))
        checked = read_card(found.folder, found.root)
        if folder is not None:
            checked.write(folder)
    place = folder or found.folder
    say(as_json, {"card": found.reference, "folder": place}, f"{found.reference} {place}")
