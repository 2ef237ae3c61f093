"""Attention with dropout by seeds, for `core_attn` on other devices than a CPU: no scores in memory."""

import torch
from torch import Tensor

from slapo_zoo.hf.attention import DeviceDropout
from slapo_zoo.kernels.blocked_attention import attention, cannot
from slapo_zoo.kernels.dropout import dropout


def serves(q: Tensor, mask: Tensor | None, causal: bool, keys: int) -> bool:
    """Return whether the kernel takes a query [B, H, S, D] over so many keys, and a mask of `transformers`.

    A boolean mask that all heads share is taken; one that is added to the scores is not.
    """
    if cannot(q):
        return False
    if mask is None:
        return not causal or q.shape[2] in (1, keys)
    return mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1


def seeded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scaling: float,
    seeds: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """dropout(softmax(q k' * scaling)) v, as [B, S, H, D].

    Args:
        q: [B, H, S, D].
        k: [B, H, T, D].
        v: [B, H, T, D].
        mask: [B or 1, 1, S or 1, T or more], True where a query sees a key; it says all, then.
        causal: without a mask, no query sees a later key.
        scaling: of the scores.
        seeds: [B * H], see dropout_mask; None where nothing is dropped.
        p: see dropout_mask.
    """
    seen, (B, _, S, _), T = None, q.shape, k.shape[2]
    if mask is not None:
        seen = mask[:, 0, :, :T].expand(B, -1, -1)
        seen = seen[:, 0] if mask.shape[2] == 1 else seen
    whole = mask is None and causal and S > 1
    return attention(q, k, v, scaling, whole, key_mask=seen, seeds=seeds, p=p).transpose(1, 2)


DEVICE_DROPOUT = DeviceDropout(serves, seeded_attention, dropout)
