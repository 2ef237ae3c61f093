"""Baselines for benchmarks of kernels: each operation as `transformers` or torch computes it without our kernels.

Dropout is torch's own, inside fused attention too, so that no baseline is slower than the model without our kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU of `x + bias` as transformers computes it: "none" by F.gelu, "tanh" by eight elementwise steps."""
    from slapo_zoo.dispatch.kernel_registry import KERNELS

    if approximate == "none":
        return functional.gelu(x + bias)
    return KERNELS["bias_gelu"].reference(x, bias, approximate)  # pyright: ignore[reportOptionalCall]


def geglu(gate: Tensor, up: Tensor, p: float = 0.0, **_: Any) -> Tensor:
    """Return dropout(gelu(gate) * up, p), T5's gated activation; gelu is torch's F.gelu with the tanh approximation."""
    return functional.dropout(functional.gelu(gate, approximate="tanh") * up, p)


def embed(
    ids: Tensor, position_ids: Tensor, kinds: Tensor, word: Tensor, position: Tensor, kind: Tensor,
    weight: Tensor, bias: Tensor, eps: float = 1e-12, padding_idx: int = -1, p: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """Return BERT's embeddings, dropout(layer_norm(word[ids] + position[position_ids] + kind[kinds])), by torch alone.
    `kinds` are token types; `weight` and `bias` are the norm's, `p` the dropout's; `padding_idx` as in F.embedding.
    """
    z = functional.embedding(ids, word, padding_idx) + functional.embedding(kinds, kind)
    z = z + functional.embedding(position_ids, position)
    return functional.dropout(functional.layer_norm(z, z.shape[-1:], weight, bias, eps), p)


def linear_loss(
    x: Tensor, weight: Tensor | None, target: Tensor, bias: Tensor | None = None,
    label_smoothing: float = 0.0, num_items: Any = 1, reduction: str = "sum", **_: Any,
) -> Tensor:  # fmt: skip
    """Return F.cross_entropy of the logits x W^T + bias [N, V] (x itself if `weight` is None) and `target` [N], -100
    where ignored, reduced as torch's `reduction` says, divided by the number `num_items`. All logits are in memory.
    """
    logits = (x if weight is None else functional.linear(x, weight, bias)).float()
    options: Any = {"label_smoothing": label_smoothing, "reduction": reduction}
    return functional.cross_entropy(logits, target, **options) / num_items


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Return softmax(scale * q k^T) v, [B, S, H, D], of q, k, v [B, H, S, D] by torch's scaled_dot_product_attention."""
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.transpose(1, 2)


def _hidden(scores_like: Tensor, S: int, T: int, causal: bool, window: int = 0) -> Tensor:
    seen = torch.ones(S, T, dtype=torch.bool, device=scores_like.device)
    seen = seen.tril(T - S) if causal else seen
    return ~(seen.triu(T - S - window + 1) if window else seen)


def t5_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None, bidirectional: bool = True,
    causal: bool = False, key_mask: Tensor | None = None, max_distance: int = 128, p: float = 0.0,
    **_: Any,
) -> Tensor:  # fmt: skip
    """Return T5's attention [B, H, S, D] of q [B, H, S, D] to k, v [B, H, T, D] by torch's fused attention. `weight`
    [buckets, H] (None: no position bias), `bidirectional` and `max_distance` are those of T5's position bias. With
    `causal` the queries are the last S of T positions and see no later key. `key_mask` [B, T] is True at keys that are
    no padding, `p` the probability of dropout, whose mask torch draws. Other options of the kernel are ignored.
    """
    S, T = q.shape[-2], k.shape[-2]
    bias = q.new_zeros(1, 1, S, T)
    if weight is not None:
        from transformers.models.t5.modeling_t5 import T5Attention

        i = torch.arange(S, device=q.device)[:, None] + (T - S if causal else 0)
        far = torch.arange(T, device=q.device) - i
        buckets = T5Attention._relative_position_bucket(
            far, bidirectional, len(weight), max_distance
        )
        bias = weight[buckets].permute(2, 0, 1)[None]
    lowest = torch.finfo(q.dtype).min
    bias = bias.masked_fill(_hidden(q, S, T, causal), lowest) if causal else bias
    bias = bias if key_mask is None else bias.masked_fill(~key_mask[:, None, None], lowest)
    return functional.scaled_dot_product_attention(q, k, v, bias, dropout_p=p, scale=1.0)


def local_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float = 1.0,
    key_mask: Tensor | None = None, p: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """Return causal attention to the last `window` keys by torch's fused attention, which is faster than GPT-Neo's own.
    q and the result are [B, H, S, D], k and v are [B, H, T, D]; `key_mask` [B, T] is True at keys that are no padding.
    """
    S, T = q.shape[-2], k.shape[-2]
    hidden = _hidden(q, S, T, causal=True, window=window)[None, None]
    hidden = hidden if key_mask is None else hidden | ~key_mask[:, None, None]
    return functional.scaled_dot_product_attention(q, k, v, ~hidden, dropout_p=p, scale=scale)


def eager_local_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float = 1.0,
    key_mask: Tensor | None = None, p: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """Return causal attention to the last `window` keys as GPT-Neo does, with fp32 scores [B, H, S, T] in memory. q and
    the result are [B, H, S, D], k and v are [B, H, T, D]; `key_mask` [B, T] is True at keys that are no padding.
    """
    S, T = q.shape[-2], k.shape[-2]
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    scores = scores.masked_fill(_hidden(q, S, T, True, window), torch.finfo(torch.float32).min)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], torch.finfo(torch.float32).min)
    return functional.dropout(scores.softmax(-1).to(v.dtype), p) @ v


def batch_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute relu(BatchNorm(x) + residual), as a residual block ends, by torch's operations with batch statistics."""
    return functional.relu(functional.batch_norm(x, None, None, weight, bias, True) + residual)


def bias_dropout_residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor, p: float = 0.0, **_: Any
) -> Tensor:  # fmt: skip
    """Compute LayerNorm(dropout(x + x_bias, p) + residual), the end of a BERT block, by torch's operations."""
    z = functional.dropout(x + x_bias, p) + residual
    return functional.layer_norm(z, x.shape[-1:], weight, bias)


# Kernels without an entry are compared with their reference.
PLAIN: dict[str, Callable[..., Any]] = {
    "bias_gelu": gelu,
    "geglu": geglu,
    "bias_relu": lambda x, bias: functional.relu(x + bias),
    "relu_dropout": lambda x, p=0.0, **_: functional.dropout(functional.relu(x), p),
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "layer_norm": lambda x, weight, bias: functional.layer_norm(x, x.shape[-1:], weight, bias),
    "bias_dropout_residual_layer_norm": bias_dropout_residual_layer_norm,
    "embedding_layer_norm": embed,
    "linear_cross_entropy": linear_loss,
    "vocab_parallel_cross_entropy": linear_loss,
    "vocab_parallel_linear_cross_entropy": linear_loss,
    "linear": functional.linear,
    "short_attention": sdpa,
    "t5_attention": t5_attention,
    "local_causal_attention": eager_local_attention,
    "batch_norm_relu_add": batch_norm,
}
# A faster implementation that an expert would use, where there is one.
EXPERT: dict[str, Callable[..., Any]] = {"local_causal_attention": local_causal_attention}


def liger() -> dict[str, Callable[..., Any]]:
    """Return {name of our kernel: Liger-Kernel's function, with our kernel's arguments}; {} if Liger is not installed."""
    try:
        from liger_kernel.transformers import functional as lf
    except ModuleNotFoundError:
        return {}

    def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        return lf.liger_layer_norm(x, weight, bias, eps)

    def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return lf.liger_rms_norm(x, weight, eps)

    def linear(x, weight, target, bias=None, label_smoothing=0.0, num_items=1, **_) -> Tensor:
        options = {"label_smoothing": label_smoothing, "reduction": "sum"}
        total: Any = lf.liger_fused_linear_cross_entropy(x, weight, target, bias, **options)
        return total / num_items

    return {
        "layer_norm": norm,
        "rms_norm": rms,
        "swiglu": lf.liger_swiglu,
        "linear_cross_entropy": linear,
    }
