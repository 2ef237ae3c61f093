"""Mask functions of `transformers` that use what the host knows of padding and packing, without asking the device."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from slapo_zoo.parallel.known import known

SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


def asks_nothing(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of `transformers` (sdpa, eager) to use what the step knows about padding.

    rewrite:  make(..., attention_mask)  -->  make(..., None) without padding; else one that skips nothing

    The original waits for the device once or twice per forward to see if all tokens are real.
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
    """Wrap `find_packed_sequence_indices` to use what the step knows: whether a row holds several sequences."""

    @wraps(find)
    def found(position_ids: Any) -> Any:
        if known().packed is None:
            return find(position_ids)
        before = position_ids[:, :1] - 1
        return (position_ids.diff(prepend=before) != 1).cumsum(-1) if known().packed else None

    return found
