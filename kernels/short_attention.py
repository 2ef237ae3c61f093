"""Kernel short_attention: softmax(scale * q k^T) v without dropout, for scores that fit the cache of a CPU.

On CPUs without AMX torch's fused attention computes bf16 no faster than fp32. Here all products except the
scores are in bf16, over as many heads as the cache holds; scores, softmax and its gradient are in fp32. B batch
rows, H heads, S queries and keys, D head dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.kernel_registry import kernel, operator

SHAPES = [(1, 3, 7, 8, False), (2, 3, 150, 16, True), (3, 5, 33, 10, True), (0, 2, 5, 8, False)]
LONGEST = 512  # keys; beyond it torch was measured to be faster
ROWS = 128  # queries per block if causal
SCORES = 1 << 19  # per block
INERT = ("sliding_window", "position_ids", "use_cache", "output_attentions", "cache_position")


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Compute the definition in torch operations (Vaswani et al. 2017, arXiv:1706.03762)."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def inputs(B: int, H: int, S: int, D: int, causal: bool, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for q, k, v [B, H, S, D]."""
    q, k, v = (torch.randn(B, S, H, D, **like).transpose(1, 2) for _ in range(3))
    return {"q": q, "k": k, "v": v, "scale": D**-0.5, "causal": causal}


def _is_faster_here() -> bool:
    """Return whether this CPU has fast bf16 products (AVX-512) but no AMX, which torch's attention would use."""
    return bool(products.CPU.get("avx512_bf16")) and not products.CPU.get("amx_bf16")


def _forward(
    core: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """Run CoreAttention.forward with this kernel."""
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
    """Compute softmax(scale * q k^T) v, as [B, S, H, D].

    Args:
        q: queries [B, H, S, D].
        k: keys in the shape of q.
        v: values in the shape of q.
        scale: factor of the scores.
        causal: no query sees a later key.
    """
    if q.device.type != "cpu":
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return out.transpose(1, 2)
    return _apply(q, k, v, scale, causal)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_out: Tensor) -> tuple:
    return *_backward(d_out.transpose(1, 2), *ctx.saved_tensors, ctx.scale, ctx.causal), None, None


def _fake(q, k, v, scale, causal):
    return _by_token(q).transpose(1, 2)


@operator("short_attention", _fake, _setup, _gradients)
def _apply(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    out, blocks = _by_token(q), _Blocks(q, causal)
    for row in range(len(q)):
        queries, keys = q[row].to(blocks.wide) * scale, k[row].to(blocks.wide)
        for heads, rows, seen in blocks:
            weights = blocks.narrow(blocks.weights(queries[heads, rows], keys[heads, seen]))
            out[row, heads, rows] = weights @ v[row, heads, seen]
    return out.transpose(1, 2)


def _fake_backward(d_out, q, k, v, scale, causal):
    return _by_token(q), _by_token(q), _by_token(q)


@operator("short_attention_backward", _fake_backward)
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (dq, dk, dv), blocks = (_by_token(q) for _ in range(3)), _Blocks(q, causal)
    for row in range(len(q)):
        queries, keys = q[row].to(blocks.wide) * scale, k[row].to(blocks.wide)
        sums = [_Sum(x[row], blocks) for x in (dk, dv)]
        for heads, rows, seen in blocks:
            g = d_out[row, heads, rows]
            weights = blocks.weights(queries[heads, rows], keys[heads, seen])
            narrow = blocks.narrow(weights)
            sums[1].add(heads, seen, narrow.transpose(1, 2) @ g)
            torch.bmm(g, v[row, heads, seen].transpose(1, 2), out=narrow)
            ds = torch.ops.aten._softmax_backward_data(
                narrow.to(blocks.wide), weights, -1, blocks.wide
            )
            narrow.copy_(ds.mul_(scale))
            dq[row, heads, rows] = narrow @ k[row, heads, seen]
            sums[0].add(heads, seen, narrow.transpose(1, 2) @ q[row, heads, rows])
        for total in sums:
            total.finish()
    return dq, dk, dv


def _by_token(q: Tensor) -> Tensor:
    """Allocate a tensor in the shape of q [B, H, S, D] with memory order [B, S, H, D], as projections use."""
    B, H, S, D = q.shape
    return q.new_empty((B, S, H, D)).transpose(1, 2)


class _Blocks:
    """Blocks of heads, queries and visible keys, with two buffers for their scores; iterating yields slices."""

    def __init__(self, q: Tensor, causal: bool):
        _, self.heads, self.length, _ = q.shape
        self.causal, self.wide = causal, torch.promote_types(q.dtype, torch.float32)
        self.rows = max(min(self.length, ROWS) if causal else self.length, 1)
        self.step = max(SCORES // max(self.length * self.rows, 1), 1)
        size = min(self.step, self.heads) * self.length * self.rows
        self.scores = q.new_empty(size, dtype=self.wide)
        self.rounded = q.new_empty(size)
        self.later = torch.ones(self.rows, self.rows, dtype=torch.bool).triu(1)

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        for head in range(0, self.heads, self.step):
            for start in range(0, self.length, self.rows):
                stop = min(start + self.rows, self.length)
                seen = slice(0, stop if self.causal else self.length)
                yield slice(head, min(head + self.step, self.heads)), slice(start, stop), seen

    def weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the softmax of the scores [heads, rows, keys] in fp32, in a shared buffer."""
        shape = (*queries.shape[:2], keys.shape[1])
        out = self.scores[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(queries, keys.transpose(1, 2), out=out)
        if self.causal:  # the last keys have the positions of the queries
            rows = shape[1]
            out[..., shape[2] - rows :].masked_fill_(self.later[:rows, :rows], -torch.inf)
        return torch.softmax(out, -1, out=out)

    def narrow(self, weights: Tensor) -> Tensor:
        """Return the weights in the model's dtype, in the other shared buffer."""
        return self.rounded[: weights.numel()].view(weights.shape).copy_(weights)


class _Sum:
    """Accumulator for the gradient of keys or values; in fp32 when several blocks of queries add to it."""

    def __init__(self, out: Tensor, blocks: _Blocks):
        self.out, self.total = out, out
        if blocks.rows < blocks.length:
            self.total = out.new_zeros(out.shape, dtype=blocks.wide)

    def add(self, heads: slice, keys: slice, part: Tensor) -> None:
        if self.total is self.out:
            self.out[heads, keys] = part
        else:
            self.total[heads, keys] += part

    def finish(self) -> None:
        if self.total is not self.out:
            self.out.copy_(self.total)
