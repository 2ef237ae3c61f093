"""Model classes whose tokens cp may shard: what is known without running a class, and errors about the others."""

import re
from dataclasses import replace
from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.parallel.losses.heads import TAG, TOKEN, head_of
from slapo_zoo.zoo.table import Table

NEAR = 6  # tokens of a window, a chunk or an expert in a model that is probed
NEARS = re.compile("window|chunk|local_attention|capacity|floor_scale")


def refusal(problem: str) -> ArchitectureError:
    """Return the error for a class whose tokens cp cannot shard; `problem` says why."""
    return ArchitectureError("zoo", "cp > 1", f"its tokens cannot be cut over cp: {problem}", "use cp=1, or tp with sequence_parallel=True")  # fmt: skip


def require_token_labels(cls: Any) -> None:
    """Raise ArchitectureError for a class whose loss is no mean over the tokens of text."""
    name, kinds = cls.__name__, set(head_of(cls.__name__).labels.values())
    if not kinds or kinds - {TOKEN, TAG}:
        raise refusal(f"the loss of {name} is no mean over tokens")
    if not accepts(cls, "input_ids"):
        raise refusal(f"{name} takes no input_ids")


def with_positions(table: Table, cls: Any, positions: str) -> Table:
    """Return a copy of the table that says how cp finds the positions of sharded tokens of `cls`: `positions` becomes
    the value of the class in the field `cut_tokens`.
    """
    return replace(table, cut_tokens={**table.cut_tokens, cls.__name__: positions})


def nearer(config: Any) -> Any:
    """Return a copy of a config with windows, chunks and the like of at most NEAR tokens, fewer than a probed cp rank
    holds.
    """
    values = config.to_dict()
    for name, value in values.items():
        if NEARS.search(name) and type(value) is int and value > NEAR:
            values[name] = NEAR
    return type(config).from_dict(values)
