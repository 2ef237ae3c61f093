"""The schedule of a live model as a card on the Hub."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

from slapo_zoo.cards import files
from slapo_zoo.cards.card import Card
from slapo_zoo.cards.hub import push
from slapo_zoo.cards.make import make_program
from slapo_zoo.errors import CardError
from slapo_zoo.parallel.agreement import together
from slapo_zoo.parallel.compat import software


def card_of(model: Any, base_model: str | None = None, any_size: bool = False) -> Card:
    """The card of a scheduled model; nothing was measured with it yet.

    Args:
        model: what the loader returned, on any rank.
        base_model: id of its checkpoint on the Hub; None takes the config's own, or the family.
        any_size: for every size of the model that meets the constraints.
    """
    mesh = model.mesh
    program = make_program(model.schedule, model.config, model.unscheduled_class, any_size)
    name = base_model or getattr(model.config, "_name_or_path", "")
    is_id = name.count("/") == 1 and not Path(name).exists()
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp}
    base = name if is_id else model.config.model_type
    return Card(program, sizes, base, software=software())


def publish(
    model: Any, repo_id: str, base_model: str | None, any_size: bool, options: dict[str, Any]
) -> str:
    """Push the card from rank 0; every rank gets its reference."""

    def first() -> str:
        if model.mesh.rank:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            card_of(model, base_model, any_size).write(Path(folder))
            return str(push(Path(folder), repo_id, **options))

    return together(model.mesh, "push_schedule_to_hub", first)[0]


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
