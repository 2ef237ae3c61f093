"""What the caller of the loader wants of a model, in one frozen value that travels by keyword."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.zoo.precision import PRECISIONS
from slapo_zoo.zoo.table import Table

Kind = Literal["zoo", "auto", "table", "card", "steps", "function", "extended"]
FROM_TABLE = ("zoo", "auto", "table", "extended")  # kinds whose program a table makes


@dataclasses.dataclass(frozen=True)
class Extended:
    """The zoo's schedule, and then a function of it; made by `extend`."""

    function: Callable[[Any], Any]


def extend(function: Callable[[Any], Any]) -> Extended:
    """The zoo's schedule and more: `schedule=extend(lambda sch: sch["h.0.mlp"].checkpoint())`.

    Args:
        function: of the schedule, called when the family's table has been applied; paths are those
            of the model, as `model.schedule` prints them.
    """
    if not callable(function):
        hint = "pass a function of one argument, the schedule"
        raise SlapoError("extend", "function", f"found {function!r}", hint)
    return Extended(function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The knobs of one model; the arguments of the same names in `from_pretrained` say the rest.

    Args:
        sequence_parallel: tp ranks shard the tokens too.
        schedule: "zoo", "auto", a Table, a card, a .json of `to_json`, a Schedule or its steps, a
            function of the schedule, or `extend(function)`.
        pipeline_order: how the stages interleave micro-batches.
        stages_per_rank: virtual stages per rank, of interleaved orders.
        checkpoint_ratio: share of the blocks whose activations are recomputed.
        checkpoint_policy: what a recomputed block keeps; or a name for each block.
        attention: the attention back end; None takes the family's own.
        kernels: "auto", "reference", a name, or several.
        seed: of dropout and of new weights; None is 0.
        device: for which "auto" chooses kernels.
        dp_shard: dp ranks that divide parameters, gradients and optimizer states.
        zero_stage: when their gradients are summed, and when they are whole.
        precision: of PRECISIONS; None computes in the dtype of the parameters.
    """

    sequence_parallel: bool = False
    schedule: Any = "zoo"
    pipeline_order: str = "1f1b"
    stages_per_rank: int | None = None
    checkpoint_ratio: float = 0.0
    checkpoint_policy: str | Sequence[str] = ""
    attention: str | None = None
    kernels: Any = "reference"
    seed: int | None = None
    device: torch.device | str = "cpu"
    precision: str | None = None
    dp_shard: int = 1
    zero_stage: int = 3

    @classmethod
    def of(cls, given: Mapping[str, Any], **changes: Any) -> "BuildOptions":
        """The options among the arguments of a function, as `locals()` has them; then `changes`."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: given[name] for name in names & given.keys()} | changes)

    def but(self, **changes: Any) -> "BuildOptions":
        """These options with some changed."""
        return dataclasses.replace(self, **changes)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """In which the model computes where it is not the dtype of its parameters."""
        found = PRECISIONS.get(self.precision or "")
        return found.compute if found and found.compute != found.parameters else None

    def parameter_dtype(self, asked: Any) -> Any:
        """The dtype of the parameters, where "auto" is asked for and the precision says it."""
        found = PRECISIONS.get(self.precision or "")
        return found.parameters if found else asked

    @property
    def kind(self) -> Kind:
        """What `schedule` is."""
        return kind_of(self.schedule)


def kind_of(schedule: Any) -> Kind:
    """What a `schedule=` is: the zoo's table, a derived one, a card, steps to replay, a function.

    Raises:
        SlapoError: none of these.
    """
    if isinstance(schedule, str) and schedule in ("zoo", "auto"):
        return "auto" if schedule == "auto" else "zoo"
    if isinstance(schedule, Table):
        return "table"
    if isinstance(schedule, str | Path):
        return "card"
    if isinstance(schedule, Extended):
        return "extended"
    if isinstance(schedule, list | tuple) or hasattr(schedule, "history"):
        return "steps"
    if callable(schedule):
        return "function"
    hint = 'pass "zoo", "auto", a card, a Schedule, its steps, a function of the schedule, or extend(function)'
    raise SlapoError("from_pretrained", "schedule", f"found {schedule!r}", hint)
