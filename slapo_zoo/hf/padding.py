"""Masks of `transformers` that do not ask the device what is known: padding, and rows of many sequences."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from slapo_zoo.parallel.known import known

SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


def asks_nothing(make: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function of `transformers` (sdpa, eager) that takes the answer from the step.

    rewrite:  make(..., attention_mask)  -->  make(..., None) without padding; else one that skips nothing

    It would ask once or twice per forward whether all tokens are real, to do without a mask then.
    """

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        padded = known().padded
        if padded is False:
            kwargs["attention_mask"] = None
        elif padded:
            kwargs |= dict.fromkeys(SKIPS, False)
        return make(*args, **kwargs)

    return made


def asks_no_positions(find: Callable[..., Any]) -> Callable[..., Any]:
    """`find_packed_sequence_indices`, which reads whether positions are those of one sequence per row."""

    @wraps(find)
    def found(position_ids: Any) -> Any:
        if known().packed is None:
            return find(position_ids)
        before = position_ids[:, :1] - 1
        return (position_ids.diff(prepend=before) != 1).cumsum(-1) if known().packed else None

    return found
