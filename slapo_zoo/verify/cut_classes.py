"""Checks of whether context parallelism (cp) may shard the tokens of a model class, which run no model."""

import re
import sys
from dataclasses import replace
from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.zoo.table import Table

NEAR = 6  # tokens of a window, a chunk or an expert in a model that is probed
ENDINGS = ("ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification", "ForCausalLM", "LMHeadModel")  # fmt: skip
NEARS = re.compile("window|chunk|local_attention|capacity|floor_scale")


def refusal(problem: str) -> ArchitectureError:
    """Return the error for a class whose tokens cp cannot shard; `problem` says why."""
    return ArchitectureError("zoo", "cp > 1", f"the tokens of this model cannot be sharded over cp: {problem}", "use cp=1, or tp with sequence_parallel=True")  # fmt: skip


def class_by_token(cls: Any) -> Any:
    """Return `cls` if its loss is a mean over the tokens of text, else a class with the same blocks and such a loss.
    ArchitectureError is raised if there is no such class, or the class takes no text or no labels.
    """
    head, beside = head_of(cls.__name__), vars(sys.modules[cls.__module__]).values()
    found = [
        one for one in beside if isinstance(one, type) and one.__module__ == cls.__module__
        and one.__name__.endswith(ENDINGS) and one.config_class is cls.config_class
    ]  # fmt: skip
    rank = lambda one: next(i for i, e in enumerate(ENDINGS) if one.__name__.endswith(e))  # noqa: E731
    if not head.labels or (not head.by_token and not found):
        name = cls.__name__
        raise refusal(f"the loss of {name} is no mean over tokens, and no other class of its module has one")  # fmt: skip
    cls = cls if head.by_token else min(found, key=rank)
    if not accepts(cls, "input_ids"):
        raise refusal(f"{cls.__name__} takes no input_ids")
    return cls


def require_token_loss(cls: Any) -> None:
    """Raise ArchitectureError for a class whose loss is no mean over the tokens of text."""
    if class_by_token(cls) is not cls:
        problem = f"the loss of {cls.__name__} is no mean over tokens, and slapo_zoo has no sharding rules of its family"
        raise refusal(problem)


def with_positions(table: Table, cls: Any, positions: str) -> Table:
    """Return a copy of `table` (sharding rules) whose field `cut_tokens` has the value `positions` for class `cls`.
    `positions` says how a cp rank gets its tokens' positions: "counted" (0, 1, ... in the row), "counted by mask" or
    "counted real" (padding is not counted), "placed" (an embedding gets the offset), "relative" (a bias) or "none".
    """
    return replace(table, cut_tokens={**table.cut_tokens, cls.__name__: positions})


def nearer(config: Any) -> Any:
    """Return a copy of a config with attention windows and chunks of at most NEAR (6) tokens, fewer than a rank has."""
    values = config.to_dict()
    for name, value in values.items():
        if NEARS.search(name) and type(value) is int and value > NEAR:
            values[name] = NEAR
    return type(config).from_dict(values)
