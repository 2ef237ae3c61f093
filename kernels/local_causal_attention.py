"""Kernel local_causal_attention: each query sees the last `window` keys (GPT-Neo's local layers).

B batch rows, S tokens, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.blocked_attention import attention, cannot
from slapo_zoo.kernels.dropout_mask import dropout_of, hides_only_padding, keys_of, mask_like

SHAPES = [
    (1, 2, 5, 16, 4),
    (2, 3, 37, 8, 9),
    (1, 2, 150, 16, 20),
    (0, 2, 8, 16, 4),
    (2, 2, 70, 24, 0),
]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute GPT-Neo's attention (GPTNeoSelfAttention._attn) of queries q [B, H, S, D], the last S of T positions, to
    the last `window` keys of k, v [B, H, T, D] (0: all earlier keys), in torch operations. `key_mask` [B, T] is False
    at padding. With `seeds` [B * H], dropout masks are hashed from them with probability `p`. GPT-Neo's
    FlashAttention-2 path is no reference: it ignores the window.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    S, T = scores.shape[-2:]
    seen = torch.ones(S, T, dtype=torch.bool, device=q.device).tril(T - S)
    if window:
        seen = seen ^ torch.ones_like(seen).tril(T - S - window)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], torch.finfo(wide).min)
    weights = scores.softmax(-1).to(v.dtype)
    mask = mask_like(weights, None, seeds, p)
    return (weights if mask is None else weights * mask) @ v


def inputs(B: int, H: int, S: int, D: int, window: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for q, k, v [B, H, S, D], with dropout.

    If `window` is 0 (full causal attention), batch row 0 ends with padding. `like` has dtype and device.
    """
    q, k, v = (torch.randn(B, H, S, D, **like) for _ in range(3))
    real = torch.full((B, 1), S)
    if window == 0:  # with a window, a query could see padding only: undefined
        real[:1] = S - S // 4
    key_mask = (torch.arange(S) < real).to(q.device)
    seeds = torch.randint(2**63 - 1, (B * H,), device=like.get("device"))
    return {"q": q / 2, "k": k / 2, "v": v, "window": window, "key_mask": key_mask, "seeds": seeds,
            "p": 0.25}  # fmt: skip


def _forward(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run GPTNeoSelfAttention.forward (same arguments) with this kernel; return (output, None).

    The class's own attention runs instead when attention weights are requested, when a cache holds earlier tokens, and
    for packed sequences.
    """
    shape = (*hidden_states.shape[:-1], module.num_heads, module.head_dim)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in projections)
    if layer_past is not None:
        k, v = layer_past.update(k, v, module.layer_id)
    S, T = q.shape[2], k.shape[2]
    if output_attentions or S != T or not hides_only_padding(attention_mask, S, T, causal=True):
        out, weights = module._attn(q, k, v, attention_mask)
        return module.resid_dropout(module.out_proj(out.transpose(1, 2).flatten(2))), weights
    weights = q.detach().new_empty(()).expand(*q.shape[:3], T)  # only the shape is used
    dropped = dropout_of(module.attn_dropout, weights, q.shape[0] * q.shape[1])
    window = module.config.window_size if module.attention_type == "local" else 0
    args = (window, 1.0, keys_of(attention_mask, T))
    out = local_causal_attention(q, k, v, *args, **dropped).transpose(1, 2)
    return module.resid_dropout(module.out_proj(out.flatten(2))), None


@kernel(
    "local_causal_attention", reference, inputs, SHAPES, cpu="blocks of the band",
    serves={"GPTNeoSelfAttention": _forward}, limits=cannot,
    passes=("attn_dropout",),
)  # fmt: skip
def local_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute causal attention [B, H, S, D] of queries q [B, H, S, D], the last S of T positions, to keys k and values
    v [B, H, T, D]; time and memory grow with S * window. A query sees the last `window` keys, its own included; for 0
    (global layers) its own and all earlier ones. `scale` multiplies scores (1 in GPT-Neo), `key_mask` [B, T] is False
    where a key is padding. The dropout mask is `keep` [B, H, S, T], of 0 and 1/(1-p), or if that is None hashed with
    probability `p` from `seeds`, int64 [B * H].
    """
    args = (None, None, key_mask, keep, seeds, p)
    return attention(q, k, v, scale, True, window, *args)
