"""Operator of local_causal_attention and t5_attention: O(S) memory, blocks without visible keys are skipped.

    out_i = sum_j mask_ij * softmax_j(scale * q_i k_j + table[class(j - i)]) v_j

over the keys j that query i sees: if causal, the last `window` up to its own; never those that `key_mask`
hides. Scores and softmax are in fp32. A query without visible keys gives 0. B batch rows, S queries, T keys
(if causal, the queries are the last S of them), H heads, D head dim, C classes of distances.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import TRITON_DTYPES, in_triton, operator
from slapo_zoo.kernels.dropout import dropout
from slapo_zoo.parallel.rng.device_seeds import is_kept

CACHE = 1 << 23  # bytes of scores at a time on a CPU
LARGEST_HEAD = 128  # columns; larger tiles spill registers


class Shape(NamedTuple):
    """Sizes of the scores [S queries, T keys], and which keys are visible; window 0 means no window."""

    S: int
    T: int
    causal: bool
    window: int

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range (first, end) of keys that queries start..stop-1 may see."""
        if not self.causal:
            return 0, self.T
        offset = self.T - self.S
        first = max(start + offset - self.window + 1, 0) if self.window else 0
        return min(first, self.T), min(stop + offset, self.T)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float = 1.0,
    causal: bool = False,
    window: int = 0,
    table: Tensor | None = None,
    classes: Tensor | None = None,
    key_mask: Tensor | None = None,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
    wide: bool = True,
) -> Tensor:
    """Compute attention, [B, H, S, D], with memory order [B, S, H, D] for the next linear.

    Args:
        q: queries [B, H, S, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
        scale: factor of the scores.
        causal: no query sees a later key.
        window: number of keys that a causal query sees, its own included; 0 for all.
        table: [H, C], bias per head and class of distance.
        classes: int32 [S + T - 1], ascending: the class of distance d = j - i at index d + S - 1.
        key_mask: [B, T], False where a key is padding, or [B, S, T], False where a query does not see it.
        keep: dropout mask of 0 and 1/(1-p), [B, H, S, T], or None.
        seeds: int64 [B * H]; the mask is hashed from them when `keep` is None.
        p: dropout probability.
        wide: multiply q by k in fp32 on a CPU, whatever their dtype.
    """
    if q.device.type != "cpu" and cannot(q):
        given = (table, classes, key_mask, keep, seeds, p)
        return in_one_piece(q, k, v, scale, causal, window, *given)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    args = (table, classes, key_mask, keep, seeds, p, scale, causal, window, wide)
    return _forward(q, k, v, *args)[0].transpose(1, 2)


def cannot(q: Tensor) -> str:
    """Return why the Triton kernels cannot serve queries [..., D], or ''."""
    if q.dtype not in TRITON_DTYPES:
        return f"{str(q.dtype)[6:]} has no Triton kernel"
    if q.dtype == torch.float32 and q.device.type != "cpu":
        return "float32 has no products on tensor cores that keep its precision: registers spill"
    wide = q.shape[-1] > LARGEST_HEAD
    return f"heads of {q.shape[-1]} columns spill, {LARGEST_HEAD} is the most" if wide else ""


def in_one_piece(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, table: Tensor | None,
    classes: Tensor | None, key_mask: Tensor | None, keep: Tensor | None, seeds: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """Compute `attention` with all attention weights in memory, so that the backward recomputes nothing."""
    scores = q @ k.transpose(-1, -2)
    scores = scores if scale == 1.0 else scores * scale
    (S, T), least = scores.shape[-2:], torch.finfo(scores.dtype).min
    if table is not None and classes is not None:
        scores = scores + table.to(scores.dtype)[:, classes.long()].unfold(-1, T, 1).flip(1)
    if causal:
        hidden = torch.ones(S, T, dtype=torch.bool, device=q.device).triu(T - S + 1)
        hidden = hidden | torch.ones_like(hidden).tril(T - S - window) if window else hidden
        scores = scores.masked_fill(hidden, least)
    if key_mask is not None:
        by_query = key_mask[:, None] if key_mask.ndim == 2 else key_mask
        scores = scores.masked_fill(~by_query[:, None], least)
    return dropout(scores.softmax(-1), keep, seeds, p) @ v


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.p, ctx.scale, ctx.causal, ctx.window, ctx.wide = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_out: Tensor, _: Any) -> tuple:
    *tensors, out, log_sum = ctx.saved_tensors
    has_table = tensors[3] is not None
    args = (*tensors, ctx.p, ctx.scale, ctx.causal, ctx.window, ctx.wide)
    dq, dk, dv, d_table = _backward(d_out, out, log_sum, *args)
    return dq, dk, dv, d_table if has_table else None, *[None] * 9


def _fake(q, k, v, table, classes, key_mask, keep, seeds, p, scale, causal, window, wide):
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, S), dtype=_wide_dtype(q))


@operator("attention", _fake, _setup, _gradients)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    classes: Tensor | None,
    key_mask: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    scale: float,
    causal: bool,
    window: int,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, S, H, D] and the log-sum-exp of the scores [B, H, S]; q, k, v are [B, S, H, D]."""
    if in_triton(q):
        from slapo_zoo.kernels import attention_triton

        args = (table, classes, key_mask, keep, seeds, p, scale, causal, window)
        return attention_triton.forward(q, k, v, *args)
    B, S, H, _ = q.shape
    blocks = _Blocks(q, k, table, classes, key_mask, keep, seeds, p, scale, causal, window, wide)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    v = _by_cell(v)
    for rows, keys in blocks:
        weights = blocks.weights(rows, keys)
        mask = blocks.mask(rows, keys)
        weights = weights if mask is None else weights.mul_(mask)
        got = weights.to(v.dtype) @ v[:, keys]
        out[:, rows] = got.unflatten(0, (B, H)).transpose(1, 2)
    return out, q.new_zeros((B, H, S), dtype=_wide_dtype(q))  # unused: backward recomputes


def _fake_backward(d_out, out, log_sum, q, k, v, table, *rest):
    d_table = q.new_empty((0, 0)) if table is None else table.new_empty(table.shape)
    return *(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)), d_table


@operator("attention_backward", _fake_backward)
def _backward(
    d_out: Tensor,
    out: Tensor,
    log_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    classes: Tensor | None,
    key_mask: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    scale: float,
    causal: bool,
    window: int,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if in_triton(q):
        from slapo_zoo.kernels import attention_triton

        args = (table, classes, key_mask, keep, seeds, p, scale, causal, window)
        return attention_triton.backward(d_out, out, log_sum, q, k, v, *args)
    blocks = _Blocks(q, k, table, classes, key_mask, keep, seeds, p, scale, causal, window, wide)
    g, v, own_q, own_k = _by_cell(d_out), _by_cell(v), _by_cell(q), _by_cell(k)
    (B, S, H, _), T, dtype = q.shape, k.shape[1], _wide_dtype(q)
    dq, dk, dv = torch.empty_like(own_q), *(torch.zeros_like(t, dtype=dtype) for t in (own_k, v))
    d_diagonal = dk.new_zeros((H, S + T - 1))
    for rows, keys in blocks:
        weights = blocks.weights(rows, keys)
        mask = blocks.mask(rows, keys)
        kept = (weights if mask is None else weights * mask).to(g.dtype)
        _add_product_(dv[:, keys], kept.transpose(1, 2), g[:, rows])
        ds = (g[:, rows] @ v[:, keys].transpose(1, 2)).to(weights.dtype)
        ds = ds if mask is None else ds.mul_(mask)
        ds = torch.ops.aten._softmax_backward_data(ds, weights, -1, weights.dtype)
        if table is not None:
            over_rows = ds.unflatten(0, (B, H)).sum(0).to(dtype)
            _add_diagonals_(d_diagonal, over_rows, rows, keys, S)
        ds = ds.to(g.dtype) if scale == 1.0 else ds.mul_(scale).to(g.dtype)
        dq[:, rows] = ds @ own_k[:, keys]
        _add_product_(dk[:, keys], ds.transpose(1, 2), own_q[:, rows])
    dq, dk, dv = (_by_token(t, B, H).to(q.dtype) for t in (dq, dk, dv))
    if table is None or classes is None:
        return dq, dk, dv, q.new_empty((0, 0))
    d_table = d_diagonal.new_zeros(table.shape).index_add_(1, classes.long(), d_diagonal)
    return dq, dk, dv, d_table.to(table.dtype)


def _by_cell(x: Tensor) -> Tensor:
    """Reorder [B, S, H, D] to [B * H, S, D], contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _by_token(x: Tensor, rows: int, heads: int) -> Tensor:
    """Reorder [B * H, S, D] to [B, S, H, D], contiguous."""
    return x.view(rows, heads, *x.shape[1:]).transpose(1, 2).contiguous()


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += (a @ b).to(total.dtype)  # mixed dtypes are not vectorised


class _Blocks:
    """Blocks of scores on a CPU; iterating yields (slice of queries, slice of all keys that they may see)."""

    def __init__(self, q, k, table, classes, key_mask, keep, seeds, p, scale, causal, window, wide):
        self.shape, self.rows = Shape(q.shape[1], k.shape[1], causal, window), q.shape[0]
        self.dtype = _wide_dtype(q) if wide else q.dtype
        self.q, self.k = (_by_cell(t).to(self.dtype) for t in (q, k))
        self.diagonal = None if table is None else table.to(self.dtype)[:, classes.long()]
        self.key_mask, self.keep, self.seeds, self.p, self.scale = key_mask, keep, seeds, p, scale

    def __iter__(self):
        cells, S, _ = self.q.shape
        reach = min(self.shape.window or self.shape.T, self.shape.T)
        rows = CACHE // max(cells * max(reach, 1) * self.dtype.itemsize, 1)
        step = min(max(rows // 32 * 32, 32), self.shape.window // 2 or 256, 256)
        for start in range(0, S if cells else 0, max(step, 1)):
            stop = min(start + max(step, 1), S)
            yield slice(start, stop), slice(*self.shape.keys(start, stop))

    def weights(self, rows: slice, keys: slice) -> Tensor:
        """Return the softmax of the scores [B * H, rows, keys]; 0 for a query without visible keys."""
        s = self.q[:, rows] @ self.k[:, keys].transpose(1, 2)
        s = s if self.scale == 1.0 else s.mul_(self.scale)
        (S, T, causal, window), H = self.shape, len(s) // self.rows
        by_row = s.view(self.rows, H, *s.shape[1:])
        if self.diagonal is not None:
            first = keys.start - (rows.stop - 1) + S - 1
            runs = self.diagonal.unfold(-1, keys.stop - keys.start, 1)
            by_row.add_(runs[:, first : first + rows.stop - rows.start].flip(1))
        if causal:
            i = torch.arange(rows.start, rows.stop, device=s.device)[:, None] + (T - S)
            j = torch.arange(keys.start, keys.stop, device=s.device)[None]
            hidden = j > i if not window else (j > i) | (j <= i - window)
            s.masked_fill_(hidden, -torch.inf)
        if self.key_mask is None:
            return torch.softmax(s, -1)
        by_query = self.key_mask[:, None] if self.key_mask.ndim == 2 else self.key_mask[:, rows]
        by_row.masked_fill_(~by_query[:, None, :, keys], -torch.inf)
        found = torch.softmax(s, -1)
        return found.masked_fill_(found[..., :1].isnan(), 0.0)

    def mask(self, rows: slice, keys: slice) -> Tensor | None:
        """Return the dropout mask [B * H, rows, keys] of a block, or None."""
        if self.keep is not None:
            return self.keep[:, :, rows, keys].flatten(0, 1)
        if self.seeds is None or self.p == 0.0:
            return None
        i = torch.arange(rows.start, rows.stop)[:, None]
        counter = i * self.shape.T + torch.arange(keys.start, keys.stop)
        kept = is_kept(counter, self.seeds[:, None, None], self.p)
        return kept.to(self.dtype).mul_(1.0 / (1.0 - self.p) if self.p < 1.0 else 1.0)


def _add_diagonals_(total: Tensor, ds: Tensor, rows: slice, keys: slice, S: int) -> None:
    """Add ds[:, i, j] to total[:, j - i + S - 1] in place, through a view whose row i is shifted by i."""
    H, n, m = ds.shape
    wide = torch.nn.functional.pad(ds.flip(1), (0, n)).flatten(1)[:, : n * (n + m - 1)]
    first = keys.start - (rows.stop - 1) + S - 1
    total[:, first : first + n + m - 1] += wide.view(H, n, n + m - 1).sum(1)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
