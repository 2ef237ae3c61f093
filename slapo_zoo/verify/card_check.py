"""Verification of a card, i.e. a folder with the directives that shard a model, before it is used or published."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from slapo_zoo.errors import CardError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.rng.seeds import get_logger
from slapo_zoo.verify.apart import verify_apart
from slapo_zoo.zoo.cards.card import Card, read_card
from slapo_zoo.zoo.cards.program import Program

LEVELS = ("quick", "off")


def require_correct(
    program: Program, config: Any, mesh: Mesh, level: str, knobs: Mapping[str, Any]
) -> None:
    """Raise a CardError if a model sharded by a card differs from plain `transformers` by more than rounding errors.

    Rank 0 verifies the schedule on a small model of the family, in a process of its own; all ranks learn the outcome.
    If the schedule fits no small model and the given model is large, nothing is verified, and rank 0 logs a warning.

    Args:
        program: the card's schedule: directives such as `shard` and `sync`, each for a pattern of module paths.
        config: config of the model that is being loaded.
        mesh: sizes of the mesh dims, and this rank's coordinates; a cp above 2 is verified as cp=2.
        level: value of `verify=` of from_pretrained: "quick" verifies on a small model, "off" does nothing.
        knobs: name --> value of the loader arguments pipeline_order and stages_per_rank.
    """
    if level not in LEVELS:
        hint = f"choose one of {LEVELS}"
        raise CardError("from_pretrained", f"verify={level!r}", "no such level", hint)
    if level == "off":
        return
    knobs = {**knobs, "cp": min(mesh.cp, 2)}
    request = json.dumps(request_for(program, config, (mesh.tp, mesh.pp, mesh.dp), knobs))

    def first() -> dict[str, Any]:
        return _outcome_of(request)

    found = together(mesh, "verify", first if mesh.rank == 0 else dict)[0]
    if found["verdict"] == "unmeasured":
        get_logger("slapo_zoo").warning("the card was not verified: %s", found["text"])
    elif found["verdict"] != "verified":
        hint = 'repair the directives named above and save the card again; verify="off" loads it unverified'
        problem = f"the schedule of this card is wrong\n{found['text']}"
        raise CardError("card", "verify", problem, hint)


def request_for(
    program: Program, config: Any, sizes: tuple[int, int, int], knobs: Mapping[str, Any],
    quick: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the request for `verify_apart` to verify `program`, a card's schedule, on a mesh of `sizes` (tp, pp, dp),
    for a small model or (`quick` False) that of `config`; `knobs` are pipeline_order, stages_per_rank and cp.
    """
    return {
        "config": config.to_dict(), "cls": program.model_class, "mesh": sizes, "quick": quick,
        "program": program.to_bytes().decode(), "knobs": dict(knobs),
    }  # fmt: skip


@cache
def _outcome_of(request: str) -> dict[str, Any]:
    """Return `verify_apart`'s report on `request`, the JSON text of a `request_for`; an equal text is not run again."""
    return verify_apart(json.loads(request))


def verify_card(folder: Path, config: Any, quick: bool = True) -> dict[str, Any]:
    """Compare a model sharded by the card (schedule) in `folder`, on the card's mesh, with the plain one. Write the
    outcome, good or bad, to verify.json there; return it as JSON data, with "text", the report in words.

    The model is a small one of the family of `config` or, if `quick` is False, one of this config.
    """
    card = read_card(folder)
    sizes = (card.mesh["tp"], card.mesh["pp"], card.mesh["dp"])
    knobs = {"cp": card.mesh.get("cp", 1)}
    found = verify_apart(request_for(card.program, config, sizes, knobs, quick))
    with_verdict(card, found).write(folder)
    return found


def with_verdict(card: Card, document: Mapping[str, Any]) -> Card:
    """Return a copy of the card that holds `document`, the report of its verification, and the hash of its schedule."""
    kept = {name: value for name, value in document.items() if name != "text"}
    return replace(card, verify={**kept, "program": card.program.hash})
