"""Attention with dropout on a CPU in O(S) memory: computed in blocks that fit the cache, recomputed in the backward.

torch's fused attention accepts no dropout mask, and its unfused form keeps three tensors of the size of the
scores. B batch rows, H heads, S queries, T keys, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.once import once

BLOCK = 1 << 19  # scores at a time
SMALL = 1 << 24  # scores; up to here the unblocked form is faster

Draw = Callable[[Tensor, float, list[int]], Tensor]  # (like, p, seeds of its cells) --> 0 or 1


def dropped_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scaling: float,
    seeds: Sequence[int], draw: Draw,
) -> Tensor:  # fmt: skip
    """Compute dropout(softmax(q k^T * scaling + bias)) v, as [B, S, H, D].

    Args:
        q: queries [B, H, S, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
        bias: broadcasts to [B, H, S, T], in the dtype of q; it gets no gradient; or None.
        p: probability that an attention weight becomes 0, below 1.
        scaling: factor of the scores.
        seeds: one seed per batch row and head.
        draw: (like, p, seeds) --> mask of 0 and 1 with the shape of `like`.
    """
    out: Any = _DroppedAttention.apply(q, k, v, bias, p, scaling, list(seeds), draw)
    return out


class _Blocks:
    """Blocks of heads of one batch row; iterating yields (row, heads), `make` computes a block's weights and mask."""

    def __init__(self, q: Tensor, k: Tensor, bias: Tensor | None, p: float, scaling: float,
                 seeds: list[int], draw: Draw):  # fmt: skip
        self.q, self.k, self.p, self.scaling = q, k, p, scaling
        self.seeds, self.draw = seeds, draw
        shape = (*q.shape[:3], k.shape[2])
        self.bias = None if bias is None else bias.expand(shape)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        B, H, S, _ = self.q.shape
        step = max(BLOCK // max(S * self.k.shape[2], 1), 1)
        for row in range(B):
            for first in range(0, H, step):
                yield row, slice(first, min(first + step, H))

    def make(self, at: tuple[int, slice]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scaled queries, the attention weights and the dropout mask of one block (row, heads)."""
        row, heads = at
        q = self.q[at] * self.scaling
        scores = q @ self.k[at].transpose(-1, -2)
        scores = scores if self.bias is None else scores.add_(self.bias[at])
        first = row * self.q.shape[1]
        seeds = self.seeds[first + heads.start : first + heads.stop]
        return q, scores.softmax(-1), self.draw(scores, self.p, seeds)


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, bias, p, scaling, seeds, draw):
        ctx.save_for_backward(q, k, v, bias)
        ctx.others = p, scaling, seeds, draw
        blocks, (B, H, S, _) = _Blocks(q, k, bias, *ctx.others), q.shape
        out = q.new_empty((B, S, H, v.shape[-1])).transpose(1, 2)
        for at in blocks:
            _, weights, keep = blocks.make(at)
            out[at] = (weights.mul_(keep) @ v[at]).div_(1.0 - p)
        return out.transpose(1, 2)

    @staticmethod
    @once
    def backward(ctx: Any, d_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        (q, k, v, bias), (p, scaling, *_) = ctx.saved_tensors, ctx.others
        blocks = _Blocks(q, k, bias, *ctx.others)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        d_out = d_out.transpose(1, 2)
        for at in blocks:
            queries, weights, keep = blocks.make(at)
            g = d_out[at] / (1.0 - p)
            dv[at] = (weights * keep).transpose(-1, -2) @ g
            d_weights = (g @ v[at].transpose(-1, -2)).mul_(keep)
            ds = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            dq[at] = (ds @ k[at]).mul_(scaling)
            dk[at] = ds.transpose(-1, -2) @ queries
        return dq, dk, dv, *[None] * 5
