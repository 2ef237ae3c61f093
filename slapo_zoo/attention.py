"""The attention seam: `transformers` calls our function, which calls the child `core_attn`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.rng import RandomStream, dropout

NAME = "slapo_zoo"  # as config._attn_implementation
ATTRIBUTE = "core_attn"


def register_attention() -> None:
    """Make NAME known to `transformers`, for attention *and* for masks.

    Without the second registration the mask is silently None and padding is ignored.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any):
    core = module._modules.get(ATTRIBUTE)
    if core is None:
        return sdpa(module, q, k, v, mask, **kwargs)
    return core(q, k, v, mask, attention=module, **kwargs)


def sdpa(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any):
    """The sdpa function of `transformers`; q [B, H, S, d] --> [B, S, H, d]."""
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"](attention, q, k, v, mask, **kwargs)


class CoreAttention(nn.Module):
    """softmax(q k' * scaling + mask) v, with dropout of the probabilities by global head.

    Args:
        stream: the random stream of the model.
        site: path of this module.
        heads: global indices of the query heads that this rank holds.
    """

    def __init__(self, stream: RandomStream, site: str, heads: Sequence[int]):
        super().__init__()
        self.stream, self.site, self.heads = stream, site, heads

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        attention: nn.Module,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Shapes: q [B, H, S, d], k and v [B, K, T, d], mask broadcasts to [B, 1, S, T]."""
        if not (self.training and dropout):
            return sdpa(attention, q, k, v, mask, dropout=0.0, scaling=scaling, **kwargs)
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        causal = kwargs.get("is_causal")
        causal = getattr(attention, "is_causal", True) if causal is None else causal
        bias = kwargs.get("position_bias")
        return self._dropped(q, k, v, mask, bias, dropout, scaling, causal), None

    def _dropped(self, q, k, v, mask, bias, p, scaling, causal) -> Tensor:
        """The explicit form: torch's fused attention offers no way to choose the dropout mask."""
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * scaling
        scores = scores if bias is None else scores + bias
        if mask is None and causal and q.shape[-2] > 1:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = mask[..., : k.shape[-2]]
            is_bool = mask.dtype == torch.bool
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask, lowest) if is_bool else scores + mask
        probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
            q.dtype
        )
        probabilities = dropout(probabilities, p, self.stream, self.site, self.heads)
        return (probabilities @ v).transpose(1, 2).contiguous()
