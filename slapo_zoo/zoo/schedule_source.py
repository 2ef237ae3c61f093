"""Kinds of values that `schedule=` of `from_pretrained` accepts, and the table of sharding rules for each."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slapo_zoo.errors import ArchitectureError, SlapoError
from slapo_zoo.parallel.digests import digest
from slapo_zoo.zoo.table import Table, families, table_for

# config fields that change no module: transformers' own bookkeeping
NOT_STRUCTURE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures",
                 "id2label", "label2id", "_attn_implementation_internal", "_experts_implementation_internal")  # fmt: skip
Kind = Literal["zoo", "auto", "table", "card", "steps", "function", "extended"]
FROM_TABLE = ("zoo", "auto", "table", "extended")  # kinds whose directives come from a table


@dataclass(frozen=True)
class Extended:
    """Value of `schedule=`, made by `extend`: the family's sharding rules, then `function`, which changes modules further."""

    function: Callable[[Any], Any]


@dataclass(frozen=True)
class CardProgram:
    """Value of `schedule=` that a loader makes of the name of a card (a published schedule), ready to be applied.

    Args:
        apply: function that gets a model's schedule and applies the card's directives (changes of modules) to it.
        table: table of the model's family, which with cp > 1 says how cp shards the tokens of the model's class.
    """

    apply: Callable[[Any], Any]
    table: Table

    def __call__(self, sch: Any) -> None:
        self.apply(sch)


def extend(function: Callable[[Any], Any]) -> Extended:
    """Return a value of `schedule=` that applies the family's sharding rules, then a function to the schedule.

    Args:
        function: called with the model's schedule, e.g. `lambda sch: sch["transformer.h.0"].checkpoint()`.
    """
    if not callable(function):
        hint = "pass a function of one argument, the schedule"
        raise SlapoError("extend", "function", f"found {function!r}, expected a function", hint)
    return Extended(function)


def kind_of(schedule: Any) -> Kind:
    """Return the kind of a `schedule=` value: "zoo" (the family's sharding rules), "auto" (these, or derived ones if it
    has none), "table" (a Table of rules), "card" (published schedule), "steps" (a Schedule or its directives),
    "function" (applied instead of rules) or "extended" (the family's rules, then a function).

    Raises:
        SlapoError: the value is of no known kind.
    """
    if isinstance(schedule, str) and schedule in ("zoo", "auto"):
        return "auto" if schedule == "auto" else "zoo"
    if isinstance(schedule, Table):
        return "table"
    if isinstance(schedule, str | Path | CardProgram):
        return "card"
    if isinstance(schedule, Extended):
        return "extended"
    if isinstance(schedule, list | tuple) or hasattr(schedule, "history"):
        return "steps"
    if callable(schedule):
        return "function"
    hint = 'pass "zoo", "auto", a card, a Schedule, its steps, a function of the schedule, or extend(function)'
    problem = f"found {schedule!r}, which is no schedule"
    raise SlapoError("from_pretrained", "schedule", problem, hint)


def find_table(config: Any, schedule: Any = "zoo") -> Table:
    """Return the table of sharding rules for a model.

    Args:
        config: config of the model.
        schedule: value of `schedule=` of `from_pretrained`: a Table is returned as it is; for a published schedule
            (CardProgram) its `table` is, and for any other value, a function too, the family's table.

    Raises:
        ArchitectureError: the family has no table.
    """
    if isinstance(schedule, Table | CardProgram):
        return schedule if isinstance(schedule, Table) else schedule.table
    if schedule == "auto" and config.model_type not in families():
        hint = "load the model with AutoScheduledModel.from_pretrained(..., schedule='auto'), which derives a table"
        raise refusal(config, "this family has no table of sharding rules yet", hint)
    hint = '; or pass schedule="auto", which derives a table and proves it'
    return table_for(config.model_type, hint)


def structure(config: Any, cls: Any) -> str:
    """Return a digest of a model's class and config, without the config fields that change no module."""
    known = json.dumps(_plain(config.to_dict()), sort_keys=True, default=str)
    return digest(f"{cls.__module__}.{cls.__name__}{known}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in NOT_STRUCTURE}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def refusal(config: Any, problem: str, hint: str = "write a table of sharding rules (docs/adding_an_architecture.md)") -> ArchitectureError:  # fmt: skip
    """Return the error for a family that schedule="auto" cannot schedule: `problem` says why, `hint` what to do."""
    what = f"schedule='auto' for model_type={config.model_type!r}"
    return ArchitectureError("zoo", what, problem, hint)
