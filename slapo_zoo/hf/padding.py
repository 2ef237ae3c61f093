"""Masks of `transformers` that do not ask the device whether there is padding, where it is known."""

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
