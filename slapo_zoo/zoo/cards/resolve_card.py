"""Reading of the schedule that `schedule=` of `from_pretrained` names: card folder, .json file or Hub reference."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from slapo_zoo.errors import CardError
from slapo_zoo.language.schedule import Step, from_json
from slapo_zoo.parallel.digests import structure_hash
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.rng.seeds import get_logger
from slapo_zoo.zoo.cards import files, strict_json
from slapo_zoo.zoo.cards.card import Card, read_card
from slapo_zoo.zoo.cards.hub import Reference, pull
from slapo_zoo.zoo.cards.make import structure_of
from slapo_zoo.zoo.cards.program import MODULE, Program


def load_card(name: str) -> Card:
    """Return the card (published schedule) in a folder, a Hub repository (org/name@revision) or a schedule.json alone;
    in the last case all its mesh sizes are 1 and it has no reports.
    """
    if name.endswith(".json") and Path(name).is_file():
        path = Path(name).absolute()
        program = Program.parse(files.read(path.parent, path.name), path.name)
        return Card(program, {"tp": 1, "pp": 1, "dp": 1}, program.model_type)
    if Path(name).is_dir():
        return read_card(Path(name))
    pulled = pull(Reference.parse(name))
    card = read_card(pulled.folder, pulled.root)
    if str(pulled.reference) != name:
        say = get_logger("slapo_zoo").info
        say("%s is the commit %s; name it to be sure of it", name, pulled.reference.revision)
    return card


def module_steps(name: str, module: nn.Module, mesh: Mesh) -> list[Step]:
    """Return (pattern of module paths, directive) for each change that a published schedule makes to an nn.Module.

    Args:
        name: card folder, or Hub reference org/name@revision.
        module: unscheduled module; it is not changed.
        mesh: mesh of all ranks.

    Raises:
        CardError: the card is for a model of `transformers`, another module, or another mesh.
    """
    program = program_for_all(name, mesh)
    if program.model_type != MODULE:
        problem = f"the card is for {program.model_type} models of transformers"
        hint = f"load such a model by AutoScheduledModel.from_pretrained(..., schedule={name!r})"
        raise CardError("card", "model_type", problem, hint)
    kind = type(module).__name__
    if kind != program.model_class:
        problem = f"the card was made for {program.model_class}, the module is {kind}"
        raise CardError("card", "class", problem, "choose another card")
    hint = "pass a module with the sizes that the card was made for, before any directive"
    _check_digest(program, structure_hash(module), hint)
    here = SimpleNamespace(model_type=MODULE)
    return program.resolve(here, mesh.sizes | {"stages": mesh.pp})


def plain_steps(name: str, mesh: Mesh) -> list[Step] | None:
    """Return (pattern of module paths, directive) for each change of modules in a .json file of `Schedule.to_json`;
    None for any other `name`. Rank 0 reads the file for all ranks. The file fits one mesh only, but does not name it.
    """
    if not name.endswith(".json"):
        return None

    def first() -> bytes:
        folder = Path(name).absolute().parent
        return files.read(folder, Path(name).name) if mesh.rank == 0 else b""

    data = together(mesh, "schedule file", first)[0]
    document = strict_json.parse(data, name)
    is_card = isinstance(document, dict) and document.keys() - {"format", "steps"}
    return None if is_card else from_json(data.decode())


def check_structure(program: Program, config: Any, cls: type) -> None:
    """Raise CardError if a published schedule was made for another model class, module tree or tensor shapes."""
    if cls.__name__ != program.model_class:
        problem = f"the card was made for {program.model_class}, the model is {cls.__name__}"
        raise CardError("card", "class", problem, "pass auto_class=, or choose another card")
    _check_digest(
        program,
        structure_of(config, cls),
        "take a card of this size, or one that `slapo-zoo card make --any-size` made",
    )


def _check_digest(program: Program, found: str, hint: str) -> None:
    if program.structure not in (None, found):
        problem = "the card was made for a model with other modules or tensor shapes"
        raise CardError("card", "structure", problem, hint)


def program_for_all(name: str, mesh: Mesh) -> Program:
    """Return on every rank the published schedule `name` (card folder, .json, org/name@revision), which rank 0 reads."""

    def first() -> bytes:
        return load_card(name).program.to_bytes() if mesh.rank == 0 else b""

    return Program.parse(together(mesh, "schedule card", first)[0])


def python_schedule(name: str, trusted: bool) -> Callable[[Any], Any]:
    """Return the function `schedule(sch)` in the `schedule.py` of a Hub repository, whose code runs in this process.

    Args:
        name: Hub reference org/name@sha.
        trusted: the user's value of trust_remote_code.

    Raises:
        CardError: the code is not trusted, the name has no commit sha, or there is no such function.
    """
    reference = Reference.parse(name)
    if not trusted or not reference.is_pinned:
        problem = "the card holds a Python program, which would run with your rights"
        hint = "read the program, then pass trust_remote_code=True and org/name@<40-hex sha>"
        raise CardError("card", name, problem, hint)
    pulled = pull(reference, with_python=True)
    warnings.warn(f"running {files.PYTHON} of {reference}: it was trusted", stacklevel=2)
    spec: Any = importlib.util.spec_from_file_location("trusted_schedule", pulled.folder / files.PYTHON)  # fmt: skip
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, "schedule", None)
    if not callable(found):
        problem = f"{files.PYTHON} defines no function schedule(sch)"
        raise CardError("card", name, problem, "add that function, or ask the card's author")
    return found
