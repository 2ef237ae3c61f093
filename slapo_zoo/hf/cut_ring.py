"""Attention over cp by a ring (arXiv:2310.01889): keys and values travel from rank to rank, one part at a time.

rewrite:  attention(q, k, v)  -->  for each part of the keys: its share of the output, weighed by its share of
          the sum of exponentials (an online softmax over the parts)

A rank holds the keys of two ranks at a time: those with which it computes, and those that arrive meanwhile. In the
backward keys travel once more, and their gradients with them, back to their rank. Dropout multiplies weights that
are normalised by all scores, dropped ones too, as in one process. B batch size, H query and K KV heads,
s queries and t keys of a rank, T = n * t keys of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.hf.cut_gather import bias_of_all
from slapo_zoo.parallel.collectives import begin_shift
from slapo_zoo.parallel.once import once
from slapo_zoo.parallel.token_cut import TokenCut


@dataclass(frozen=True)
class Scores:
    """Attention scores of one call, computed from this rank's queries and the keys of one cp rank at a time.

    Args:
        cut: how the tokens are sharded over cp.
        scaling: factor of the scores.
        cap: bounds scores to cap * tanh(scores / cap); None sets no bound.
        mask: bool or additive, broadcasts to [B, H, s, T]; or None.
        causal: True hides later keys from a query if `mask` is None.
        p: probability that dropout sets an attention weight to 0.
        keep: function that draws the bool dropout mask [B, H, s, T], True: kept, the same in each call; None for p = 0.
    """

    cut: TokenCut
    scaling: float
    cap: float | None
    mask: Tensor | None
    causal: bool
    p: float
    keep: Callable[[], Tensor] | None

    def of(
        self, q: Tensor, k: Tensor, bias: Tensor | None, owner: int, rows: slice
    ) -> tuple[Tensor, Tensor | float]:
        """Return (scores [B, H, c, t] of the c queries that the slice `rows` takes from q [B, H, s, d], for the keys k
        [B, K, t, d] of cp rank `owner`; derivative of the cap at each score, 1.0 without a cap). `bias`
        [1, H, s, n * t] is the position bias for the keys of all n ranks, or None. Scores of hidden keys are -inf, or
        with dropout the lowest number of q's dtype.
        """
        hidden = -torch.inf if self.keep is None else torch.finfo(q.dtype).min  # as in one process
        scores, slope = (q[:, :, rows] * self.scaling), 1.0
        scores, at = wide(rows_by_keys(scores, k.transpose(-1, -2))), self.place(owner, k, rows)
        scores = scores if bias is None else scores + bias[at]
        if self.cap is not None:
            scores = (scores / self.cap).tanh()
            scores, slope = scores * self.cap, 1 - scores.square()
        if self.mask is not None:
            seen = self.mask[at if self.mask.shape[-2] > 1 else (..., at[-1])]
            is_bool = seen.dtype == torch.bool
            scores = scores.masked_fill_(~seen, hidden) if is_bool else scores + seen
        elif self.causal and owner == self.cut.r:
            later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1 + rows.start)
            scores = scores.masked_fill_(later, hidden)
        return scores, slope

    def chunks(self, q: Tensor) -> Iterator[slice]:
        """Yield slices of q's queries, so short that the scores of one slice are about as large as q [B, H, s, d]."""
        for start in range(0, q.shape[2], q.shape[3]):
            yield slice(start, min(start + q.shape[3], q.shape[2]))

    def place(self, owner: int, k: Tensor, rows: slice) -> tuple[Any, slice, slice]:
        """Return the index of the queries `rows` and the keys of rank `owner` in a bias or mask [.., s, n * t], which
        is for this rank's s queries and all n cp ranks' keys; each cp rank has t keys, as k [B, K, t, d] has.
        """
        return ..., rows, slice(owner * k.shape[2], (owner + 1) * k.shape[2])

    @property
    def divisor(self) -> float:
        """Return the divisor of the weights that dropout keeps: 1 - p, or 1 if p = 1, where no weight is kept."""
        return 1 - self.p if self.p < 1 else 1.0

    def parts(self, x: Tensor) -> Iterator[tuple[int, Tensor, bool]]:
        """Send x [B, K, t, 2 * d], this rank's keys and values side by side, around the ring of cp ranks; yield, for
        this rank and then each other: (its cp coordinate, its keys and values, False if this rank's queries see none).
        """
        for step in range(self.cut.n):
            arrives = begin_shift(x, self.cut.group) if step + 1 < self.cut.n else None
            owner = (self.cut.r - step) % self.cut.n
            yield owner, x, self.mask is not None or not self.causal or owner <= self.cut.r
            x = arrives() if arrives else x


def attend(
    cut: TokenCut, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    options: dict[str, Any], run: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return (output [B, s, H, d], None) of the attention of this rank's queries to the keys of all n cp ranks, which
    call this together. q [B, H, s, d], k and v [B, K, t, d] are of this rank's tokens (`cut`: how tokens are sharded);
    the mask broadcasts to [B, 1, s, n * t]. `attention` is transformers' module, `options` its further arguments;
    `run`, an OverKeys, has the call's `dropout`, `scaling` and `mask_again`.
    """
    causal, (B, H, s, d), total = options.get("is_causal"), q.shape, cut.n * k.shape[2]
    causal = getattr(attention, "is_causal", True) if causal is None else causal
    bias = bias_of_all(attention, options.get("position_bias"), k.shape[2], total)
    keep = run.mask_again(torch.empty((), dtype=torch.bool, device=q.device).expand(B, H, s, total))
    scaling = d**-0.5 if run.scaling is None else run.scaling
    scores = Scores(cut, scaling, options.get("softcap"), mask, causal, run.dropout, keep)
    out: Any = _Ring.apply(scores, q, k, v, bias)
    return out.transpose(1, 2).contiguous(), None


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, unchanged if its dtype has 32 bits or more."""
    return x.float() if x.element_size() < 4 else x


def rows_by_keys(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y for x [B, H, s, a] and y [B, K, a, b]; H / K adjacent heads of x use the same head of y."""
    (B, H, s, a), K = x.shape, y.shape[1]
    return (x.reshape(B, K, H // K * s, a) @ y).view(B, H, s, y.shape[-1])


def keys_by_rows(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """Return x^T @ y [B, K, t, d] for x [B, H, s, t] and y [B, H, s, d], summed over the H / K query heads that share a KV
    head; K is `heads`.
    """
    x, y = (z.reshape(z.shape[0], heads, -1, z.shape[-1]) for z in (x, y))
    return x.transpose(-1, -2) @ y


class _Ring(torch.autograd.Function):
    """Autograd function of (Scores, q [B, H, s, d], k and v [B, K, t, d], bias or None): attention of this cp rank's
    queries to the keys of all cp ranks, [B, H, s, d]. Forward and backward each pass keys and values around the ring.
    """

    @staticmethod
    def forward(ctx, scores, q, k, v, bias):
        keep = scores.keep and scores.keep()
        out = wide(q).new_zeros((*q.shape[:3], v.shape[-1]))
        total, lowest = out.new_zeros((*q.shape[:3], 1)), torch.finfo(out.dtype).min
        top = torch.full_like(total, lowest)  # largest score so far; `total` sums exp(score - top)
        for owner, kv, is_seen in scores.parts(torch.cat([k, v], -1)):
            k_o, v_o = kv.split([k.shape[-1], v.shape[-1]], -1)
            for rows in scores.chunks(q) if is_seen else ():
                found, _ = scores.of(q, k_o, bias, owner, rows)
                highest = torch.maximum(top[:, :, rows], found.amax(-1, keepdim=True))
                fade = (top[:, :, rows] - highest).exp_()
                weights = found.sub_(highest).exp_()
                top[:, :, rows] = highest
                total[:, :, rows].mul_(fade).add_(weights.sum(-1, keepdim=True))
                if keep is not None:
                    weights.mul_(keep[scores.place(owner, k, rows)])
                found = wide(rows_by_keys(weights.to(v.dtype), v_o))
                out[:, :, rows].mul_(fade).add_(found)
        total.masked_fill_(total == 0, 1.0)  # of queries that see no key
        out = out.div_(total).div_(scores.divisor).to(q.dtype)
        ctx.scores = scores
        ctx.save_for_backward(q, k, v, bias, out, top, total)  # a log-sum-exp would lose `total`
        return out

    @staticmethod
    @once
    def backward(ctx, grad):
        scores, (q, k, v, bias, out, *sums) = ctx.scores, ctx.saved_tensors
        keep, width = scores.keep and scores.keep(), k.shape[-1]
        mean = (wide(grad) * wide(out)).sum(-1, keepdim=True)
        to_q, to_bias = wide(torch.zeros_like(q)), None if bias is None else torch.zeros_like(bias)
        kv = torch.cat([k, v], -1)
        to_kv = wide(torch.zeros_like(kv))
        for owner, kv_o, is_seen in scores.parts(kv):
            k_o, v_o = kv_o.split([width, v.shape[-1]], -1)
            for rows in scores.chunks(q) if is_seen else ():
                at = scores.place(owner, k, rows)
                found, slope = scores.of(q, k_o, bias, owner, rows)
                top, total, middle, given = (x[:, :, rows] for x in (*sums, mean, grad))
                weights = found.sub_(top).exp_().div_(total)
                back = wide(rows_by_keys(given, v_o.transpose(-1, -2)))
                kept = weights
                if keep is not None:
                    back, kept = back.mul_(keep[at]).div_(scores.divisor), weights * keep[at] / scores.divisor  # fmt: skip
                to_kv[..., width:] += keys_by_rows(kept.to(q.dtype), given, k.shape[1])
                back = back.sub_(middle).mul_(weights).mul_(slope)
                if to_bias is not None:
                    to_bias[at] += back.sum_to_size(to_bias[at].shape)
                back = back.to(q.dtype)
                to_q[:, :, rows] += rows_by_keys(back, k_o) * scores.scaling
                to_kv[..., :width] += keys_by_rows(back, q[:, :, rows], k.shape[1]) * scores.scaling
            to_kv = begin_shift(to_kv, scores.cut.group)()
        to_k, to_v = to_kv.to(k.dtype).split([width, v.shape[-1]], -1)
        return None, to_q.to(q.dtype), to_k, to_v, to_bias
