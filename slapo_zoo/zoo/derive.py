"""The table of a config: the family's own, or the one that is passed as the schedule."""

import hashlib
import json
from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.zoo.table import Table, families, table_for

# of transformers' own bookkeeping: they change no module
NOT_STRUCTURE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures",
                 "id2label", "label2id", "_attn_implementation_internal", "_experts_implementation_internal")  # fmt: skip


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
    return hashlib.sha256(f"{cls.__module__}.{cls.__name__}{known}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in NOT_STRUCTURE}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def refusal(config: Any, problem: str, hint: str = "write a table (docs/adding_an_architecture.md)") -> ArchitectureError:  # fmt: skip
    """The error of a family that schedule="auto" cannot serve."""
    what = f"schedule='auto' for model_type={config.model_type!r}"
    return ArchitectureError("zoo", what, problem, hint)
