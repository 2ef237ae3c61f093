"""The schedule of a live model or module as a card, in a folder or on the Hub."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slapo_zoo.cards import files
from slapo_zoo.cards.card import Card
from slapo_zoo.cards.hub import push
from slapo_zoo.cards.make import make_program, module_program
from slapo_zoo.cards.program import MODULE
from slapo_zoo.errors import CardError
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together


def card_of(model: Any, base_model: str | None = None, any_size: bool = False) -> Card:
    """Make the card of a scheduled model; nothing was measured with it yet.

    Args:
        model: what the loader returned, on any rank.
        base_model: id of its checkpoint on the Hub; None takes the config's own, or the family.
        any_size: for every size of the model that meets the constraints.
    """
    mesh = model.mesh
    program = make_program(model.schedule, model.config, model.unscheduled_class, any_size)
    name = base_model or getattr(model.config, "_name_or_path", "")
    is_id = name.count("/") == 1 and not Path(name).exists()
    base = name if is_id else model.config.model_type
    return Card(program, mesh.sizes, base, software=software())


def card_of_module(sch: Schedule) -> Card:
    """Return the card of a schedule of one's own module; nothing was measured with it yet."""
    return Card(module_program(sch), sch.mesh.sizes, MODULE, software=software())


def publish(mesh: Mesh, make: Callable[[], Card], place: str | Path, **options: Any) -> str:
    """Write a card from rank 0, into a folder or a repository of the Hub; every rank gets its name.

    Args:
        mesh: of all ranks.
        make: returns the card; called on rank 0 alone.
        place: a folder (a `Path`, what begins with `.`, `/` or `~`, or one that is there), or org/name.
        options: of `hub.push`; a folder takes none.
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
    return not isinstance(place, str) or place[:1] in (".", "/", "~") or Path(place).is_dir()


def _write(card: Card, folder: Path, options: Mapping[str, Any]) -> str:
    if options:
        problem = f"{', '.join(options)} belongs to a repository of the Hub, and this is a folder"
        raise CardError("card", str(folder), problem, "leave it out, or pass org/name")
    card.write(folder)
    return str(folder)


def write_beside(model: Any, folder: Path) -> None:
    """The schedule beside the weights of a folder; a README.md that lies there stays.

    A schedule with a live function is left out, and a warning says why.
    """
    try:
        contents = card_of(model).contents()
    except CardError as error:
        warnings.warn(f"the schedule is not published with the weights: {error}", stacklevel=2)
        return
    (folder / files.PROGRAM).write_bytes(contents[files.PROGRAM])
    if not (folder / files.README).exists():
        (folder / files.README).write_bytes(contents[files.README])
