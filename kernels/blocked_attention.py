"""Attention in blocks of scores, with O(S) memory; the operator behind all attention kernels of this package.

    out_i = sum_j mask_ij * softmax_j(scale * q_i k_j + bias_ij + table[class(j - i)]) v_j

over the keys j that query i sees: if causal, the last `window` up to its own; never those that `key_mask`
hides. Scores and softmax are in fp32. A query without visible keys gives 0. B batch rows, S queries, T keys
(if causal, the queries are the last S of them), H heads, D head dim, C classes (ranges of the distance j - i).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slapo_zoo.dispatch.choose_kernel import TRITON_DTYPES, in_triton
from slapo_zoo.dispatch.kernel_registry import operator
from slapo_zoo.kernels.dropout import dropout
from slapo_zoo.parallel.rng.device_seeds import drawn_cells, is_kept

SCORES = 1 << 19  # scores of a block, which stay in the cache of a CPU
QUERIES = 128  # queries of a block where later keys are hidden
LARGEST_HEAD = 128  # head dim; larger tiles spill registers


class Given(NamedTuple):
    """Options of `attention`, all but q, k and v: `table` and `classes` (bias by distance), `bias` (added to the
    scores), `key_mask` (False: hidden), `keep`, `seeds`, `places`, `p`, `drawn` (dropout), `scale`, `causal`, `window`,
    `wide`. Each has a default; `attention` tells their shapes.
    """

    table: Tensor | None = None
    classes: Tensor | None = None
    bias: Tensor | None = None
    key_mask: Tensor | None = None
    keep: Tensor | None = None
    seeds: Tensor | None = None
    places: Tensor | None = None
    p: float = 0.0
    scale: float = 1.0
    causal: bool = False
    window: int = 0
    drawn: int = 0
    wide: bool = True

    def runs_in_tiles(self, q: Tensor) -> bool:
        """Return whether the Triton kernels run for `q`; they support neither `bias` nor dropout drawn on a CPU."""
        return in_triton(q) and self.bias is None and not self.drawn


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
    bias: Tensor | None = None,
    places: Tensor | None = None,
    drawn: int = 0,
) -> Tensor:
    """Compute attention; return [B, H, S, D], stored in memory as [B, S, H, D] for the linear that follows.

    Args:
        q: queries [B, H, S, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
        scale: factor of the scores.
        causal: True if no query sees a later key; the queries are the last S of T positions.
        window: number of keys that a causal query sees, its own included; 0 for all.
        table: [H, C], one bias per head and bucket of distances j - i (key j, query i), needs `classes`; None: no bias.
        classes: int32 [S + T - 1], ascending: the bucket, a column of `table`, of each distance -(S - 1), ..., T - 1.
        key_mask: [B, T], False where a key is padding, or [B, S, T], False where a query does not see it.
        keep: dropout mask of 0 and 1/(1-p), [B, H, S, T], or None.
        seeds: int64 [B * H]; the mask is made from them when `keep` is None.
        p: dropout probability.
        wide: True multiplies q by k in fp32 on a CPU, whatever their dtype.
        bias: added to the scores (CPU only); broadcasts to [B, H, S, T] and gets no gradient; or None.
        places: index [S] of each token in the row of L (see `drawn`), if its padding was removed; None: the first
            tokens.
        drawn: 0: dropout masks are hashed from the seeds. L > 0 (CPU only): a generator draws from each seed the mask
            [L, L] of a row of L tokens, padding included, of which the rows and columns of these tokens are taken.
    """
    if q.device.type != "cpu" and cannot(q):
        given = (table, classes, key_mask, keep, seeds, p)
        return in_one_piece(q, k, v, scale, causal, window, *given)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    tensors = (table, classes, bias, key_mask, keep, seeds, places)
    return _forward(q, k, v, *tensors, p, scale, causal, window, drawn, wide)[0].transpose(1, 2)


def cannot(q: Tensor) -> str:
    """Return why the Triton kernels cannot compute attention of queries q [..., D] (dtype, head dim), or '' if they can."""
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
    """Compute attention [B, H, S, D] of q [B, H, S, D], k and v [B, H, T, D] with all weights in memory. `scale`
    multiplies the scores. With `causal`, the queries are the last S of T positions and see no later key, and only the
    last `window` keys if that is not 0. `table` [H, C] has a bias per head and bucket of distances j - i, `classes`
    [S + T - 1] the bucket of each distance. `key_mask` [B, T] or [B, S, T] is False for hidden keys. The dropout mask
    is `keep` [B, H, S, T] or, if that is None, hashed with probability `p` from `seeds` [B * H].
    """
    scores = q @ k.transpose(-1, -2)
    scores = scores if scale == 1.0 else scores * scale
    (S, T), least = scores.shape[-2:], torch.finfo(scores.dtype).min
    if table is not None and classes is not None:
        scores = scores + table.to(scores.dtype)[:, classes.long()].unfold(-1, T, 1).flip(1)
    seen = torch.ones(S, T, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(T - S).triu(T - S - window + 1 if window else -S)
    if key_mask is not None:
        seen = seen & (key_mask[:, None] if key_mask.ndim == 2 else key_mask)[:, None]
    scores = scores.masked_fill(~seen, least) if causal or key_mask is not None else scores
    out = dropout(scores.softmax(-1), keep, seeds, p) @ v
    return out if key_mask is None else out.masked_fill(~seen.any(-1, keepdim=True), 0.0)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.numbers = inputs[10:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:10], *output)


def _gradients(ctx: Any, d_out: Tensor, _: Any) -> tuple:
    *tensors, out, log_sum = ctx.saved_tensors
    dq, dk, dv, d_table = _backward(d_out, out, log_sum, *tensors, *ctx.numbers)
    return dq, dk, dv, None if tensors[3] is None else d_table, *[None] * 12


def _fake(q, k, v, *given):
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, S), dtype=_wide_dtype(q))


@operator("attention", _fake, _setup, _gradients)
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    table: Tensor | None, classes: Tensor | None, bias: Tensor | None, key_mask: Tensor | None, keep: Tensor | None,
    seeds: Tensor | None, places: Tensor | None,
    p: float, scale: float, causal: bool, window: int, drawn: int, wide: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of q [B, S, H, D], k and v [B, T, H, D]; return (output [B, S, H, D], log-sum-exp of the scores
    [B, H, S], zeros on a CPU). The other arguments are those of `attention`: bias by distance (`table`, `classes`),
    added `bias`, `key_mask`, dropout (`keep`, `seeds`, `places`, `p`, `drawn`), `scale`, `causal`, `window`, `wide`.
    """
    tensors = (table, classes, bias, key_mask, keep, seeds, places)
    given = Given(*tensors, p, scale, causal, window, drawn, wide)
    if given.runs_in_tiles(q):
        from slapo_zoo.kernels import attention_triton

        return attention_triton.forward(q, k, v, given)
    blocks, (B, S, H, _) = _Blocks(q, k, given), q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    by_head, v = out.transpose(1, 2), v.transpose(1, 2)
    for row in range(B):
        for heads, rows, keys in blocks.of(row):
            weights = blocks.weights(heads, rows, keys)
            if (mask := blocks.mask(heads, rows, keys)) is not None:
                weights.mul_(mask)
            got = blocks.narrow(weights) @ v[row, heads, keys]
            by_head[row, heads, rows] = got if blocks.kept == 1.0 else got.div_(blocks.kept)
    return out, q.new_zeros(
        (B, H, S), dtype=_wide_dtype(q)
    )  # unused: the backward recomputes the blocks


def _fake_backward(d_out, out, log_sum, q, k, v, table, *rest):
    d_table = q.new_empty((0, 0)) if table is None else table.new_empty(table.shape)
    return *(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)), d_table


@operator("attention_backward", _fake_backward)
def _backward(
    d_out: Tensor, out: Tensor, log_sum: Tensor, q: Tensor, k: Tensor, v: Tensor,
    table: Tensor | None, classes: Tensor | None, bias: Tensor | None, key_mask: Tensor | None, keep: Tensor | None,
    seeds: Tensor | None, places: Tensor | None,
    p: float, scale: float, causal: bool, window: int, drawn: int, wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (table, classes, bias, key_mask, keep, seeds, places)
    given = Given(*tensors, p, scale, causal, window, drawn, wide)
    if given.runs_in_tiles(q):
        from slapo_zoo.kernels import attention_triton

        return attention_triton.backward(d_out, out, log_sum, q, k, v, given)
    blocks, (B, S, H, _), T = _Blocks(q, k, given), q.shape, k.shape[1]
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    d_out, q, k, v, dq, dk, dv = (t.transpose(1, 2) for t in (d_out, q, k, v, *made))
    d_diagonal = q.new_zeros((H, S + T - 1), dtype=_wide_dtype(q))
    for row in range(B):
        g = d_out[row] if blocks.kept == 1.0 else d_out[row] / blocks.kept
        of_keys, of_values = _Sum(dk[row], blocks), _Sum(dv[row], blocks)
        for heads, rows, keys in blocks.of(row):
            weights, mask = blocks.weights(heads, rows, keys), blocks.mask(heads, rows, keys)
            kept = blocks.narrow(weights if mask is None else weights * mask)
            of_values.add(heads, keys, kept.transpose(1, 2), g[heads, rows])
            ds = blocks.product(g[heads, rows], v[row, heads, keys])
            ds = ds if mask is None else ds.mul_(mask)
            ds = torch.ops.aten._softmax_backward_data(ds, weights, -1, weights.dtype)
            if table is not None:
                _add_diagonals_(d_diagonal[heads], ds, rows, keys, S)
            ds = blocks.narrow(ds if scale == 1.0 else ds.mul_(scale))
            dq[row, heads, rows] = ds @ k[row, heads, keys]
            of_keys.add(heads, keys, ds.transpose(1, 2), q[row, heads, rows])
        of_keys.finish()
        of_values.finish()
    if table is None or classes is None:
        return *made, q.new_empty((0, 0))  # pyright: ignore[reportReturnType]
    d_table = d_diagonal.new_zeros(table.shape).index_add_(1, classes.long(), d_diagonal)
    return *made, d_table.to(table.dtype)  # pyright: ignore[reportReturnType]


class _Blocks:
    """Attention scores of q [B, S, H, D] and k [B, T, H, D] on a CPU, block by block: `of(row)` yields the blocks of a
    batch row, each of some heads, consecutive queries and all keys that they may see; `weights` and `mask` compute a
    block. `given` has the options of attention. Scores are in fp32 if `given.wide`, else in the dtype of q.
    """

    def __init__(self, q: Tensor, k: Tensor, given: Given):
        (B, S, H, _), T = q.shape, k.shape[1]
        self.given, self.S, self.T = given, S, T
        self.dtype = _wide_dtype(q) if given.wide else q.dtype
        self.q, self.k, self.heads = q.transpose(1, 2), k.transpose(1, 2), H
        seen = min(given.window + QUERIES, T) if given.window else T
        most = max(SCORES // max(seen, 1), 32)
        if given.causal:
            most = min(most, given.window // 2 or QUERIES, QUERIES)
        elif given.drawn:  # the mask of a head is drawn whole: more runs of queries save no memory
            most = S
        self.rows = max(min(most, S), 1)
        self.step = min(max(SCORES // max(seen * self.rows, 1), 1), max(H, 1))
        size = self.step * self.rows * seen
        self.scores, self.rounded = q.new_empty(size, dtype=self.dtype), q.new_empty(size)
        self.in_one_run = self.rows >= S > 0 and not given.window
        self.diagonal = self.bias = None
        if given.table is not None and given.classes is not None:
            self.diagonal = given.table.to(self.dtype)[:, given.classes.long()]
        if given.bias is not None:
            self.bias = given.bias.expand(B, H, S, T)
        hashed_or_drawn = given.keep is None and given.seeds is not None and given.p < 1.0
        self.kept = 1.0 - given.p if hashed_or_drawn else 1.0  # share of weights that a mask leaves

    def of(self, row: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield slices (heads, queries, keys) of each block of batch row `row`: for some heads all queries, then the
        next heads. `weights` and `mask` compute blocks of this row until the next call of `of`.
        """
        scale, self.row, self.drawn = self.given.scale, row, None
        queries = self.q[row].to(self.dtype)
        self.queries = queries if scale == 1.0 else queries * scale
        self.keys = self.k[row].to(self.dtype)
        for first in range(0, self.heads, self.step):
            heads = slice(first, min(first + self.step, self.heads))
            self.drawn = None
            for start in range(0, self.S, self.rows):
                stop = min(start + self.rows, self.S)
                yield heads, slice(start, stop), self._seen(start, stop)

    def _seen(self, start: int, stop: int) -> slice:
        """Return the slice of keys that queries start..stop-1 may see."""
        if not self.given.causal:
            return slice(0, self.T)
        later, window = self.T - self.S, self.given.window
        first = max(start + later - window + 1, 0) if window else 0
        return slice(min(first, self.T), min(stop + later, self.T))

    def weights(self, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Return the softmax of the scores [heads, queries, keys] of a block of the current batch row, whose slices
        `of` yielded; 0 for a query that sees no key. The next call overwrites the result.
        """
        queries, given, row = self.queries[heads, rows], self.given, self.row
        s = _first(self.scores, (*queries.shape[:2], keys.stop - keys.start))
        torch.bmm(queries, self.keys[heads, keys].transpose(1, 2), out=s)
        if self.diagonal is not None:
            first = keys.start - (rows.stop - 1) + self.S - 1
            runs = self.diagonal[heads].unfold(-1, s.shape[2], 1)
            s.add_(runs[:, first : first + s.shape[1]].flip(1))
        if self.bias is not None:
            s.add_(self.bias[row, heads, rows, keys])
        if given.causal:
            self._hide_(s, rows, keys)
        if given.key_mask is None:
            return torch.softmax(s, -1, out=s)
        seen = given.key_mask[row]
        s.masked_fill_(~(seen[None] if seen.ndim == 1 else seen[rows])[:, keys], -torch.inf)
        torch.softmax(s, -1, out=s)
        return s.masked_fill_(s[..., :1].isnan(), 0.0)

    def _hide_(self, s: Tensor, rows: slice, keys: slice) -> None:
        """Set scores `s` of queries `rows` to -inf for those of `keys` that causality or the window hides."""
        window, later = self.given.window, self.T - self.S
        first = keys.start if window else max(keys.stop - s.shape[1], keys.start)
        i = torch.arange(rows.start, rows.stop)[:, None] + later
        j = torch.arange(first, keys.stop)[None]
        hidden = (j > i) | (j <= i - window) if window else j > i
        s[..., first - keys.start :].masked_fill_(hidden, -torch.inf)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a b^T of two tensors in the model's dtype, cast to the dtype of the scores."""
        out = _first(self.rounded, (*a.shape[:2], b.shape[1]))
        return torch.bmm(a, b.transpose(1, 2), out=out).to(self.dtype)

    def narrow(self, x: Tensor) -> Tensor:
        """Return `x` cast from the dtype of the scores to that of the model; later calls overwrite the result."""
        return x if x.dtype == self.rounded.dtype else _first(self.rounded, x.shape).copy_(x)

    def mask(self, heads: slice, rows: slice, keys: slice) -> Tensor | None:
        """Return the dropout mask [heads, queries, keys] of a block of the current batch row; None without dropout. A
        mask that was given (`given.keep`) holds 0 and 1/(1-p), one made from seeds 0 and 1: there the caller divides
        the attention's output by `self.kept` = 1-p.
        """
        given, first = self.given, self.row * self.heads
        if given.keep is not None:
            return given.keep[self.row, heads, rows, keys]
        if given.seeds is None or given.p == 0.0:
            return None
        seeds = given.seeds[first + heads.start : first + heads.stop]
        if given.drawn:
            if self.drawn is None:
                self.drawn = self._draw(seeds.tolist())
            return self.drawn[:, rows, keys]
        i = torch.arange(rows.start, rows.stop)[:, None]
        counter = i * self.T + torch.arange(keys.start, keys.stop)
        return is_kept(counter, seeds[:, None, None], given.p).to(self.dtype)

    def _draw(self, seeds: list[int]) -> Tensor:
        """Draw a dropout mask of 0 and 1 for each of `seeds`, one per head of a batch row; return
        [heads, queries, keys]. The keys are the `given.drawn` tokens of the row with padding; but if padding was
        removed, only the rows and columns of the tokens that are left are returned, whose indices are `given.places`.
        """
        places, tokens = self.given.places, self.given.drawn
        shape = (len(seeds), self.S if places is None else tokens, tokens)
        found = drawn_cells(self.scores.new_empty(()).expand(shape), self.given.p, seeds)
        return found if places is None else found[:, places][:, :, places]


class _Sum:
    """Gradient of the keys or values [H, T, D] of a batch row, to which `add` adds a block's share and which `finish`
    writes to `out`. The sum is in fp32, or in the dtype of `out` if each key gets a single share.
    """

    def __init__(self, out: Tensor, blocks: _Blocks):
        self.out = self.total = out
        if not blocks.in_one_run:
            self.total = out.new_zeros(out.shape, dtype=_wide_dtype(out))

    def add(self, heads: slice, keys: slice, a: Tensor, b: Tensor) -> None:
        """Add the matrix product a b to the gradient of the heads and keys that the two slices select."""
        part = self.total[heads, keys]
        if self.total is self.out:
            part.copy_(a @ b)
        elif part.dtype == a.dtype:
            part.baddbmm_(a, b)
        else:
            part += (a @ b).to(part.dtype)  # mixed dtypes are not vectorised

    def finish(self) -> None:
        """Copy the accumulated gradient to `out`, the tensor given to `_Sum`, if it was not accumulated there."""
        if self.total is not self.out:
            self.out.copy_(self.total)


def _first(buffer: Tensor, shape: Any) -> Tensor:
    """Return the first elements of a buffer as a tensor of `shape`, which has 3 axes."""
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def _add_diagonals_(total: Tensor, ds: Tensor, rows: slice, keys: slice, S: int) -> None:
    """Add ds [H, `rows`, `keys`], gradients of scores (query i, key j), in place to total [H, S + T - 1] at j - i + S - 1."""
    H, n, m = ds.shape
    wide = torch.nn.functional.pad(ds.to(total.dtype).flip(1), (0, n))
    wide = wide.flatten(1)[:, : n * (n + m - 1)]
    first = keys.start - (rows.stop - 1) + S - 1
    total[:, first : first + n + m - 1] += wide.view(H, n, n + m - 1).sum(1)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
