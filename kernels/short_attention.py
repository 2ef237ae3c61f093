"""Kernel short_attention: softmax(scale * q k^T) v without dropout, for scores that fit the cache of a CPU.

On CPUs without AMX torch's fused attention computes bf16 no faster than fp32. Here all products except the
scores are in bf16, over as many heads as the cache holds; scores, softmax and its gradient are in fp32. B batch
rows, H heads, S queries and keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.blocked_attention import attention

SHAPES = [(1, 3, 7, 8, False), (3, 5, 33, 10, True), (2, 3, 150, 16, True), (0, 2, 5, 8, False)]
LONGEST = 512  # keys; beyond it torch was measured to be faster
INERT = ("sliding_window", "position_ids", "use_cache", "output_attentions", "cache_position")


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Compute softmax(scale * q k^T) v, [B, S, H, D], in plain torch operations (Vaswani et al. 2017, arXiv:1706.03762)."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def inputs(B: int, H: int, S: int, D: int, causal: bool, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for q, k, v [B, H, S, D]; `like` has dtype and device."""
    q, k, v = (torch.randn(B, S, H, D, **like).transpose(1, 2) for _ in range(3))
    return {"q": q, "k": k, "v": v, "scale": D**-0.5, "causal": causal}


def _is_faster_here() -> bool:
    """Return whether this CPU has fast bf16 products by AVX-512 and no AMX: with AMX torch's attention is fast."""
    return bool(products.CPU.get("avx512_bf16")) and not products.CPU.get("amx_bf16")


def _forward(
    core: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """Run the forward of `core`, the child that computes softmax(q k^T) v, with this kernel if it supports the arguments,
    else by its class's forward; return (output, attention weights or None). `options` are the keyword arguments of an
    attention function of `transformers` (scaling, is_causal, ...).
    """
    if not _serves(core, q, k, v, mask, options):
        return type(core).forward(core, q, k, v, mask, **options)
    causal, scale = options.get("is_causal"), options.get("scaling")
    causal = getattr(options["attention"], "is_causal", True) if causal is None else causal
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    return short_attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal), None


def _serves(core: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict) -> bool:
    known = ("attention", "dropout", "scaling", "is_causal", *INERT)
    plain = all(name in known or value is None for name, value in options.items())
    return (
        core.training and mask is None and plain and not options.get("dropout")
        and core.stream.real_tokens is None and core.name == "sdpa"
        and q.device.type == "cpu" and q.dtype == torch.bfloat16 and _is_faster_here()
        and q.shape[-2] == k.shape[-2] <= LONGEST and q.shape[-1] == v.shape[-1]
    )  # fmt: skip


@kernel(
    "short_attention", reference, inputs, SHAPES, cpu="products of bf16, scores of fp32",
    serves={"CoreAttention": _forward},
)  # fmt: skip
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """Compute softmax(scale * q k^T) v of q, k, v [B, H, S, D] as [B, S, H, D]; `causal` hides later keys."""
    if q.device.type != "cpu":
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return out.transpose(1, 2)
    return attention(q, k, v, scale, causal).transpose(1, 2)
