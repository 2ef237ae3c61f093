"""`training_state.json`: the part of a training checkpoint that is no tensor: step, mesh, random states, ..."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slapo_zoo.errors import MeshError, WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.encode import decode
from slapo_zoo.weights.index import read_json
from slapo_zoo.weights.optimizer import check_record
from slapo_zoo.weights.random_state import check_states

FILE, FORMAT = "training_state.json", "slapo-zoo-training-state/1"
PASS_SAVED = "pass the folder that save_checkpoint wrote; if it is that one, copy it again: it may be damaged"
OF_COPY = ("data_position", "extra")  # one value per data-parallel rank
BY_DP = "$by_dp"


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` (step, mesh, random states, ... of a training checkpoint) to `training_state.json` in `folder`."""
    text = json.dumps({"format": FORMAT, **state}, indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Return the fields of `training_state.json` in `folder`; one of unexpected form or range raises WeightsError."""
    place = str(folder / FILE)
    try:
        state = read_json(folder / FILE, PASS_SAVED)
    except FileNotFoundError:
        hint = "pass the folder that save_checkpoint wrote; weights alone are loaded by from_pretrained"
        raise WeightsError(place, "", "this file of the checkpoint is missing", hint) from None
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != FORMAT:
        raise WeightsError(place, "format", f"found {found!r:.80}, expected {FORMAT!r}", PASS_SAVED)
    for name, check in CHECKS.items():
        if name not in state:
            raise WeightsError(place, name, "found no such field", PASS_SAVED)
        if problem := _problem(check, state[name]):
            raise WeightsError(place, name, problem, PASS_SAVED)
    _check_together(place, state)
    return state


def _problem(check: Callable[[Any], str], value: Any) -> str:
    try:
        decode(value)
        return check(value)
    except (TypeError, ValueError) as error:  # a WeightsError is a ValueError
        return getattr(error, "problem", f"found {value!r:.80}: {error}")
    except RecursionError:
        return "values are nested too deep"


def _check_together(place: str, state: Mapping[str, Any]) -> None:
    """Raise WeightsError, naming the file `place`, if fields of `state` contradict, e.g. states for too few ranks."""
    mesh = Mesh(**state["mesh"])
    if problem := check_states(state["torch_random"], mesh.world_size):
        raise WeightsError(place, "torch_random", problem, PASS_SAVED)
    if problem := _loss_scale(state.get("loss_scale")):
        raise WeightsError(place, "loss_scale", problem, PASS_SAVED)
    for name in OF_COPY:
        kept = state[name]
        if isinstance(kept, dict) and BY_DP in kept and len(kept[BY_DP]) != mesh.dp:
            problem = f"found {len(kept[BY_DP])} values, expected one for each of dp={mesh.dp}"
            raise WeightsError(place, name, problem, PASS_SAVED)


def _count(value: Any) -> str:
    is_count = type(value) is int and 0 <= value < 2**63
    return "" if is_count else f"found {value!r:.40}, expected an integer of at least 0"


def _mesh(value: Any) -> str:
    names = {"tp", "pp", "dp"}
    if not isinstance(value, dict) or set(value) - {"cp"} != names:
        return f"found {value!r:.80}, expected the sizes tp, pp and dp"
    try:
        size = Mesh(**value).world_size
    except MeshError as error:
        return error.problem
    is_size = all(type(one) is int for one in value.values()) and size <= 2**20
    problem = f"found {value!r:.80}, expected integers whose product is at most {2**20}"
    return "" if is_size else problem


def _stream(value: Any) -> str:
    if not isinstance(value, dict) or set(value) - {"calls", "turns"} != {"seed", "step"}:
        return f"found {value!r:.80}, expected seed and step"
    if type(value["seed"]) is not int or not -(2**63) <= value["seed"] < 2**64:
        return f"found the seed {value['seed']!r:.40}, expected an integer of 64 bits"
    turns = dict(value.get("turns", ()))  # for another kind of value Python's error is the reason
    counts = (value["step"], value.get("calls", 0), *turns, *turns.values())
    return next(filter(None, map(_count, counts)), "")


def _scheduler(value: Any) -> str:
    is_state = value is None or isinstance(value, dict)
    return "" if is_state else f"found {type(value).__name__}, expected the state of a scheduler"


def _copies(value: Any) -> str:
    if isinstance(value, dict) and BY_DP in value:
        is_list = set(value) == {BY_DP} and isinstance(value[BY_DP], list)
        return "" if is_list else "found more than one value for each data-parallel rank"
    return ""


def _loss_scale(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, dict) or set(value) != {"scale", "good_steps"}:
        return f"found {value!r:.60}, expected scale and good_steps"
    scale = value["scale"]
    is_scale = type(scale) in (int, float) and 0 < scale < float("inf")
    problem = f"found the scale {scale!r:.40}, expected a finite number above 0"
    return _count(value["good_steps"]) if is_scale else problem


CHECKS: dict[str, Callable[[Any], str]] = {
    "step": _count, "mesh": _mesh, "random": _stream, "torch_random": lambda it: "" if isinstance(it, dict) else f"found {type(it).__name__}, expected generator states",
    "optimizer": lambda it: "" if it is None else check_record(it), "scheduler": _scheduler, "data_position": _copies, "extra": _copies,
}  # fmt: skip


def by_dp_rank(name: str, values: Sequence[Any], mesh: Mesh, where: str) -> Any:
    """Return a field of the training state as JSON: its value if all ranks have the same, else {"$by_dp": [one value
    per dp rank]}.

    Args:
        name: name of the field.
        values: JSON form of the field's value, by rank.
        mesh: mesh of all ranks.
        where: name of the calling step, for errors.

    Raises:
        WeightsError: tp, pp or cp peers, which get the same batch rows, have different values.
    """
    texts = [json.dumps(value, sort_keys=True) for value in values]  # NaN is equal to NaN here
    firsts = {rank: mesh.seen_by(rank).at(tp=0, pp=0, cp=0) for rank in range(mesh.world_size)}
    differ = [rank for rank, first in firsts.items() if texts[rank] != texts[first]]
    if differ:
        rank, first = differ[0], firsts[differ[0]]
        problem = f"rank {rank} passed {values[rank]!r:.60}, rank {first} {values[first]!r:.60}"
        hint = "ranks that share a dp coordinate are fed the same rows: pass the same on all"
        raise WeightsError(where, name, problem, hint)
    found = {rank: texts[rank] for rank in mesh.seen_by(0).peers("batch")}
    return values[0] if len(set(found.values())) == 1 else {BY_DP: [values[rank] for rank in found]}


def of_dp_ranks(state: Mapping[str, Any], name: str) -> list[Any]:
    """Return the values of field `name` of a training `state`, a list with one per dp rank of the saved mesh; for
    "extra" (the user's own data) the list has a single value if all ranks saved the same.
    """
    kept = state[name]
    if isinstance(kept, dict) and BY_DP in kept:
        return [decode(one) for one in kept[BY_DP]]
    # an equal data position is listed per rank, since another dp redistributes the rows
    return [decode(kept)] * (1 if name == "extra" else state["mesh"]["dp"])
