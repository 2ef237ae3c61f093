"""Wrappers of transformers' mask functions that learn padding and packing from `known()`, what the host found in the
batch before the step: to read it from a tensor on the GPU, the host would have to wait.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from slapo_zoo.parallel.known import known

SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


def mask_without_wait(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of `transformers` (sdpa, eager) so that the host does not wait for the device.

    rewrite:  make(..., attention_mask)  -->  make(..., None) if the step knows that no token is padding

    The original reads the mask once or twice per forward to see if all tokens are real. The wrapper takes this from
    padding counts that the host made before the step; if there is padding, it builds the mask without reading it.
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


def packing_without_wait(find: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `find_packed_sequence_indices` of `transformers`, which returns the number [B, S] of each token's sequence
    in its row, or None if no row packs several. It reads position ids on the device to see this, for which the host
    waits; the wrapper does so only if the host did not look before the step (`known().packed` is None).
    """

    @wraps(find)
    def found(position_ids: Any) -> Any:
        if known().packed is None:
            return find(position_ids)
        before = position_ids[:, :1] - 1
        return (position_ids.diff(prepend=before) != 1).cumsum(-1) if known().packed else None

    return found
