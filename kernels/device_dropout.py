"""Attention with hashed dropout for `core_attn` on devices other than a CPU, without scores in memory."""

import torch
from torch import Tensor

from slapo_zoo.hf.attention import DeviceDropout
from slapo_zoo.kernels.blocked_attention import attention, cannot
from slapo_zoo.kernels.dropout import dropout


def serves(q: Tensor, mask: Tensor | None, causal: bool, keys: int) -> bool:
    """Return whether the kernel can run for queries [B, H, S, D], a mask of `transformers` and a number of keys.

    A boolean mask that all heads share is supported; an additive mask is not.
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
    """Compute dropout(softmax(q k^T * scaling)) v, as [B, S, H, D].

    Args:
        q: queries [B, H, S, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
        mask: [B or 1, 1, S or 1, T or more], True where a query sees a key; `causal` is ignored then.
        causal: without a mask, no query sees a later key.
        scaling: factor of the scores.
        seeds: int64 [B * H], from which dropout masks are hashed; None: no dropout.
        p: dropout probability.
    """
    seen, (B, _, S, _), T = None, q.shape, k.shape[2]
    if mask is not None:
        seen = mask[:, 0, :, :T].expand(B, -1, -1)
        seen = seen[:, 0] if mask.shape[2] == 1 else seen
    whole = mask is None and causal and S > 1
    return attention(q, k, v, scaling, whole, key_mask=seen, seeds=seeds, p=p).transpose(1, 2)


DEVICE_DROPOUT = DeviceDropout(serves, seeded_attention, dropout)
