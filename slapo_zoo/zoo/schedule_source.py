"""The kinds of `schedule=`, and the table that each of them names."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slapo_zoo.errors import ArchitectureError, SlapoError
from slapo_zoo.parallel.digests import digest
from slapo_zoo.zoo.table import Table, families, table_for

# of transformers' own bookkeeping: they change no module
NOT_STRUCTURE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures",
                 "id2label", "label2id", "_attn_implementation_internal", "_experts_implementation_internal")  # fmt: skip
Kind = Literal["zoo", "auto", "table", "card", "steps", "function", "extended"]
FROM_TABLE = ("zoo", "auto", "table", "extended")  # kinds whose program a table makes


@dataclass(frozen=True)
class Extended:
    """The zoo's schedule, and then a function of it; made by `extend`."""

    function: Callable[[Any], Any]


def extend(function: Callable[[Any], Any]) -> Extended:
    """Extend the zoo's schedule: `schedule=extend(lambda sch: sch["h.0.mlp"].checkpoint())`.

    Args:
        function: of the schedule, called when the family's table has been applied; paths are those
            of the model, as `model.schedule` prints them.
    """
    if not callable(function):
        hint = "pass a function of one argument, the schedule"
        raise SlapoError("extend", "function", f"found {function!r}", hint)
    return Extended(function)


def kind_of(schedule: Any) -> Kind:
    """Return the kind of a `schedule=`: the zoo's table, a derived one, a card, steps to replay, a function.

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


def find_table(config: Any, schedule: Any = "zoo") -> Table:
    """Return the table that a model of a config is built with.

    Args:
        config: of `transformers`.
        schedule: a Table is that of the model; for anything else it is the family's.

    Raises:
        ArchitectureError: the family has none.
    """
    if isinstance(schedule, Table):
        return schedule
    if schedule == "auto" and config.model_type not in families():
        raise refusal(config, "it is derived when a model is loaded, and none was", "load it first")
    hint = '; or pass schedule="auto", which derives a table and proves it'
    return table_for(config.model_type, hint)


def structure(config: Any, cls: Any) -> str:
    """A digest of what determines a model's modules and forward: its class and config."""
    known = json.dumps(_plain(config.to_dict()), sort_keys=True, default=str)
    return digest(f"{cls.__module__}.{cls.__name__}{known}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in NOT_STRUCTURE}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def refusal(config: Any, problem: str, hint: str = "write a table (docs/adding_an_architecture.md)") -> ArchitectureError:  # fmt: skip
    """The error of a family that schedule="auto" cannot serve."""
    what = f"schedule='auto' for model_type={config.model_type!r}"
    return ArchitectureError("zoo", what, problem, hint)
