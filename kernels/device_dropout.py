"""Attention with dropout masks made from seeds, without scores in memory, on any device; `hf.attention` calls it."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.hf.attention import DeviceDropout, additive
from slapo_zoo.kernels.blocked_attention import attention, cannot
from slapo_zoo.kernels.dropout import dropout

SMALL = 1 << 24  # number of scores up to which a CPU keeps all: that is faster


def serves(q: Tensor, mask: Tensor | None, keys: int, drawn: bool) -> bool:
    """Return whether `seeded_attention` supports these arguments and is the faster choice for them.

    With hashed dropout it supports a boolean attention mask that all heads share, but no additive one. With dropout
    drawn on a CPU it supports every attention mask, but is slower for SMALL (2^24) attention scores or fewer.

    Args:
        q: queries [B, H, S, D].
        mask: attention mask of `transformers`, or None.
        keys: number T of keys.
        drawn: True if a random generator of the CPU draws the dropout masks, False if they are hashed from seeds.
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
        q: queries [B, H, S, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
        mask: [B or 1, 1, S or 1, T or more], of which the first T columns count; bool: True where a query sees a key;
            else added to the scores.
        causal: True if no query sees a later key.
        scaling: factor of the scores.
        seeds: int64 [B * H], from which dropout masks are made; None: no dropout.
        p: dropout probability.
        drawn: 0: dropout masks are hashed from the seeds. L > 0 (CPU only): a generator draws from each seed the mask
            [L, L] of a row of L tokens, padding included, of which the rows and columns of these tokens are taken.
        places: index [S] of each token in the row of L, if its padding was removed; None: the first tokens of the row.
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
