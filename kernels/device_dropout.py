"""Attention and dropout of `core_attn` by seeds: no scores in memory, on any device."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.hf.attention import DeviceDropout, additive
from slapo_zoo.kernels.blocked_attention import attention, cannot
from slapo_zoo.kernels.dropout import dropout

SMALL = 1 << 24  # scores up to which a CPU keeps them all: it is faster


def serves(q: Tensor, mask: Tensor | None, keys: int, drawn: bool) -> bool:
    """Return whether attention by seeds takes a query [B, H, S, D] over so many keys, and a mask of `transformers`.

    Where masks are hashed, a boolean mask that all heads share is taken; one that is added to the scores is not.
    Where they are drawn, on a CPU, every mask is taken.
    """
    if drawn:
        return q.shape[0] * q.shape[1] * q.shape[2] * keys > SMALL
    if cannot(q):
        return False
    return mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1)


def seeded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scaling: float,
    seeds: Tensor | None, p: float, drawn: int = 0, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute dropout(softmax(q k^T * scaling)) v, as [B, S, H, D].

    Args:
        q: [B, H, S, D].
        k: [B, H, T, D].
        v: [B, H, T, D].
        mask: True where a query sees a key, or what is added to the scores; [B or 1, 1, S or 1, T or more].
        causal: no query sees a later key.
        scaling: of the scores.
        seeds: [B * H], see dropout_mask; None where nothing is dropped.
        p: see dropout_mask.
        drawn: tokens of a row whose masks a CPU draws; 0 where they are hashed.
        places: [S], of the `drawn` tokens of one row those that these are; None: the first ones.
    """
    (B, _, S, _), T = q.shape, k.shape[2]
    options: dict[str, Any] = {"seeds": seeds, "p": p}
    if drawn:
        bias = None if mask is None else additive(mask[..., :T], q.dtype)
        options |= {"wide": False, "drawn": drawn, "places": places, "bias": bias}
    elif mask is not None:
        seen = mask[:, 0, :, :T].expand(B, -1, -1)
        options["key_mask"] = seen[:, 0] if mask.shape[2] == 1 else seen
    return attention(q, k, v, scaling, causal and S > 1, **options).transpose(1, 2)


DEVICE_DROPOUT = DeviceDropout(serves, seeded_attention, dropout)
