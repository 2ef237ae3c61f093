"""Publishing of the recorded changes (schedule) of a loaded model or module as a card, in a folder or on the Hub."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slapo_zoo.errors import CardError
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.zoo.cards import files
from slapo_zoo.zoo.cards.card import Card
from slapo_zoo.zoo.cards.hub import push
from slapo_zoo.zoo.cards.make import make_program, module_program
from slapo_zoo.zoo.cards.program import MODULE


def card_of(model: Any, base_model: str | None = None, any_size: bool = False) -> Card:
    """Return a card, i.e. the schedule of a loaded model with a README, ready to publish; nothing is measured yet.

    Args:
        model: model that AutoScheduledModel loaded, on any rank.
        base_model: Hub id of the model's checkpoint; None takes the id in the config, or else the family.
        any_size: True for a card that fits every size of the class with the same number of blocks; False: this size.
    """
    mesh = model.mesh
    program = make_program(model.schedule, model.config, model.unscheduled_class, any_size)
    name = base_model or getattr(model.config, "_name_or_path", "")
    is_id = name.count("/") == 1 and not Path(name).exists()
    base = name if is_id else model.config.model_type
    return Card(program, mesh.sizes, base, software=software())


def card_of_module(sch: Schedule) -> Card:
    """Return a card (a schedule to publish) of an nn.Module that is not from `transformers`; nothing is measured yet."""
    return Card(module_program(sch), sch.mesh.sizes, MODULE, software=software())


def publish(mesh: Mesh, make: Callable[[], Card], place: str | Path, **options: Any) -> str:
    """Write a card (a schedule to publish) from rank 0 to a folder or the Hub; every rank returns folder or org/name@sha.

    Args:
        mesh: mesh of the ranks, all of which call this function.
        make: function that returns the card; called on rank 0 alone.
        place: folder, or Hub repository org/name; a text that begins with `.`, `/`, `~` or names a folder is a folder.
        options: further arguments of `hub.push` (token, private, tag, ...); refused if `place` is a folder.
    """

    def first() -> str:
        if mesh.rank:
            return ""
        if _is_folder(place):
            return _write(make(), Path(place).expanduser(), options)
        with tempfile.TemporaryDirectory() as folder:
            make().write(Path(folder))
            return str(push(Path(folder), str(place), **options))

    return together(mesh, "publish a card", first)[0]


def _is_folder(place: str | Path) -> bool:
    return not isinstance(place, str) or place[:1] in (".", "/", "~") or Path(place).exists()


def _write(card: Card, folder: Path, options: Mapping[str, Any]) -> str:
    if options:
        problem = f"{', '.join(options)} is for a repository of the Hub, but a folder is given"
        raise CardError("card", str(folder), problem, "leave it out, or pass org/name")
    card.write(folder)
    return str(folder)


def write_beside(model: Any, folder: Path) -> None:
    """Write a card of the model (schedule.json, README.md) into a folder of its saved weights; an existing README.md is kept.

    If no card can hold the schedule, e.g. because of a Python function in it, nothing is written and a warning given.
    """
    try:
        contents = card_of(model).contents()
    except CardError as error:
        warnings.warn(f"the schedule is not published with the weights: {error}", stacklevel=2)
        return
    (folder / files.PROGRAM).write_bytes(contents[files.PROGRAM])
    if not (folder / files.README).exists():
        (folder / files.README).write_bytes(contents[files.README])
