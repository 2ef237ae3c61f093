"""Triton kernels of blocked_attention.py: tiles of scores in registers, online softmax, no atomics.

The forward follows FlashAttention-2 (Dao 2023, arXiv:2307.08691). One backward kernel loops over keys for dq and the
gradient of the bias table (a bias per head and range of distances of query and key), another over queries for dk and
dv. The table's gradient is a partial sum per head, batch row and block of queries; these are added in a fixed order.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Launches pass options that are not in the kernel's signature, and numbers for constexpr.

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slapo_zoo.kernels.dropout_triton import contiguous, scaled_keep, threshold_and_scale


@triton.jit
def _load(base, rows, count, stride, HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows with indices `rows` of the [count, HEAD] matrix at pointer `base` as a tile.
    Rows are `stride` elements apart; beyond `count`, and from HEAD to BLOCK_D, the tile is 0.
    """
    d = tl.arange(0, BLOCK_D)
    ok = (rows[:, None] < count) & (d[None, :] < HEAD)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + d[None, :], mask=ok, other=0.0)


@triton.jit
def _store(base, rows, count, stride, x, HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    ok = (rows[:, None] < count) & (d[None, :] < HEAD)
    tl.store(base + rows[:, None].to(tl.int64) * stride + d[None, :], x, mask=ok)


@triton.jit
def _scores(
    q, k, i, j, row, head, table, classes, key_mask, S, T, C, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (fp32 attention scores [queries, keys], -inf for hidden keys; int32 [queries, keys], the column of the
    bias table that was added to each) for tiles of queries q and keys k with indices i and j, of one batch `row` and
    `head`.

    Score (i, j) is q k^T * scale, with TABLE plus table[head, classes[j - i + S - 1]]: `table` [H, C] has a bias per
    head and range of distances, `classes` [S + T - 1] the range of each distance. There are S queries, the last of T
    positions. CAUSAL hides later keys, WINDOW also those `window` or more positions back, `key_mask` those where it is
    False (KEYS is "keys" for [B, T], "pairs" for [B, S, T], else "none"). PRECISION is tl.dot's `input_precision`.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    ok = (i[:, None] < S) & (j[None, :] < T)
    kind = tl.zeros(s.shape, tl.int32)
    if TABLE:
        kind = tl.load(classes + j[None, :] - i[:, None] + S - 1, mask=ok, other=0)
        s += tl.load(table + head * C + kind, mask=ok, other=0.0).to(tl.float32)
    if CAUSAL:
        distance = j[None, :] - i[:, None] - (T - S)
        ok = ok & (distance <= 0)
        if WINDOW:
            ok = ok & (distance > -window)
    if KEYS == "keys":
        real = tl.load(key_mask + row * T + j, mask=j < T, other=0)
        ok = ok & (real != 0)[None, :]
    elif KEYS == "pairs":
        at = (row.to(tl.int64) * S + i)[:, None] * T + j[None, :]
        ok = ok & (tl.load(key_mask + at, mask=ok, other=0) != 0)
    return tl.where(ok, s, float("-inf")), kind


@triton.jit
def _keep(i, j, cell, keep, seeds, S, T, threshold, scale, MASK: tl.constexpr):
    """Return the dropout factors (0 or `scale`) of the scores of queries i and keys j, as a tile.
    MASK "keep" loads them from `keep` [cells, S, T]; "seeds" hashes them from seeds[cell] and
    compares with `threshold`. `cell` is batch row * H + head.
    """
    at = i[:, None].to(tl.int64) * T + j[None, :]
    if MASK == "keep":
        ok = (i[:, None] < S) & (j[None, :] < T)
        found = tl.load(keep + cell.to(tl.int64) * S * T + at, mask=ok, other=0.0).to(tl.float32)
    else:  # `else`, since code after a `return` is compiled too, without seeds
        found = scaled_keep(at, tl.load(seeds + cell), threshold, scale)
    return found


@triton.jit
def _forward_kernel(
    out, log_sum, q, k, v, table, classes, key_mask, keep, seeds,
    S, T, H, C, window, scale, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0)  # grid axis 0: the only one that may exceed 65,535
    row, head = cell // H, cell % H
    stride = H * HEAD
    start = tl.program_id(1) * BM
    i = start + tl.arange(0, BM)
    own_q = (row.to(tl.int64) * S * H + head) * HEAD
    own_k = (row.to(tl.int64) * T * H + head) * HEAD
    q_tile = _load(q + own_q, i, S, stride, HEAD, BLOCK_D)
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BLOCK_D), tl.float32)
    first, last = 0, T
    if CAUSAL:
        last = tl.minimum(start + BM + T - S, T)
        if WINDOW:
            first = tl.maximum(start + T - S - window + 1, 0) // BN * BN
    for j0 in range(first, last, BN):
        j = j0 + tl.arange(0, BN)
        k_tile = _load(k + own_k, j, T, stride, HEAD, BLOCK_D)
        s, _ = _scores(q_tile, k_tile, i, j, row, head, table, classes, key_mask, S, T, C, window,
                       scale, CAUSAL, WINDOW, TABLE, KEYS, PRECISION)  # fmt: skip
        new = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        before = tl.exp(highest - safe)
        total = total * before + tl.sum(p, 1)
        if MASK != "none":
            p *= _keep(i, j, cell, keep, seeds, S, T, threshold, keep_scale, MASK)
        v_tile = _load(v + own_k, j, T, stride, HEAD, BLOCK_D)
        acc = acc * before[:, None]
        acc += tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        highest = new
    seen = total > 0
    _store(out + own_q, i, S, stride, acc / tl.where(seen, total, 1.0)[:, None], HEAD, BLOCK_D)
    found = tl.where(seen, highest + tl.log(tl.where(seen, total, 1.0)), 0.0)
    tl.store(log_sum + cell * S + i, found, mask=i < S)


@triton.jit
def _delta_kernel(
    delta, out, d_out, S, H, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr
):
    """Compute delta[row, head, query], the sum over the head dim of attention's output `out` times its gradient `d_out`."""
    cell = tl.program_id(0)
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    own = ((cell // H).to(tl.int64) * S * H + cell % H) * HEAD
    o = _load(out + own, i, S, H * HEAD, HEAD, BLOCK_D).to(tl.float32)
    g = _load(d_out + own, i, S, H * HEAD, HEAD, BLOCK_D).to(tl.float32)
    tl.store(delta + cell * S + i, tl.sum(o * g, 1), mask=i < S)


@triton.jit
def _query_kernel(
    dq, d_table, d_out, delta, log_sum, q, k, v, table, classes, key_mask, keep, seeds,
    S, T, H, C, window, scale, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the gradient dq of the queries q [B, S, H, D]; a Triton program computes BM queries of a head and loops
    over the keys. `d_out` is the gradient of attention's output, `delta` [B, H, S] the result of `_delta_kernel`,
    `log_sum` [B, H, S] the log-sum-exp of the scores. `d_table` [B, H, blocks of queries, C] gets partial sums of the
    gradient of the bias table. `_options` returns the arguments after v (bias table, masks, dropout, sizes).
    """
    cell = tl.program_id(0)  # grid axis 0: the only one that may exceed 65,535
    row, head = cell // H, cell % H
    stride = H * HEAD
    start = tl.program_id(1) * BM
    i = start + tl.arange(0, BM)
    own_q = (row.to(tl.int64) * S * H + head) * HEAD
    own_k = (row.to(tl.int64) * T * H + head) * HEAD
    q_tile = _load(q + own_q, i, S, stride, HEAD, BLOCK_D)
    g = _load(d_out + own_q, i, S, stride, HEAD, BLOCK_D)
    lse = tl.load(log_sum + cell * S + i, mask=i < S, other=0.0)
    d = tl.load(delta + cell * S + i, mask=i < S, other=0.0)
    acc = tl.zeros((BM, BLOCK_D), tl.float32)
    c = tl.arange(0, BLOCK_C)
    histogram = tl.zeros((BLOCK_C,), tl.float32)
    first, last = 0, T
    if CAUSAL:
        last = tl.minimum(start + BM + T - S, T)
        if WINDOW:
            first = tl.maximum(start + T - S - window + 1, 0) // BN * BN
    for j0 in range(first, last, BN):
        j = j0 + tl.arange(0, BN)
        k_tile = _load(k + own_k, j, T, stride, HEAD, BLOCK_D)
        s, kind = _scores(q_tile, k_tile, i, j, row, head, table, classes, key_mask, S, T, C,
                          window, scale, CAUSAL, WINDOW, TABLE, KEYS, PRECISION)  # fmt: skip
        p = tl.exp(s - lse[:, None])
        v_tile = _load(v + own_k, j, T, stride, HEAD, BLOCK_D)
        dp = tl.dot(g, tl.trans(v_tile), input_precision=PRECISION)
        if MASK != "none":
            dp *= _keep(i, j, cell, keep, seeds, S, T, threshold, keep_scale, MASK)
        ds = p * (dp - d[:, None])
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION)
        if TABLE:  # tiles near the diagonal hold a few classes, others one
            low = tl.load(classes + tl.maximum(j0 - (start + BM - 1), 1 - S) + S - 1)
            high = tl.load(classes + tl.minimum(j0 + BN - 1 - start, T - 1) + S - 1)
            for at in range(low, high + 1):
                part = tl.sum(tl.where(kind == at, ds, 0.0))
                histogram += tl.where(c == at, part, 0.0)
    _store(dq + own_q, i, S, stride, acc * scale, HEAD, BLOCK_D)
    if TABLE:
        at = (cell * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * C + c
        tl.store(d_table + at, histogram, mask=c < C)


@triton.jit
def _key_kernel(
    dk, dv, d_out, delta, log_sum, q, k, v, table, classes, key_mask, keep, seeds,
    S, T, H, C, window, scale, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dk and dv of keys and values [B, T, H, D]; a Triton program computes BN keys of a head and
    loops over the queries. `d_out` is the gradient of attention's output, `delta` [B, H, S] is from `_delta_kernel`,
    `log_sum` [B, H, S] is the log-sum-exp of the scores. `_options` returns the arguments after v (masks, sizes, ...).
    """
    cell = tl.program_id(0)  # grid axis 0: the only one that may exceed 65,535
    row, head = cell // H, cell % H
    stride = H * HEAD
    start = tl.program_id(1) * BN
    j = start + tl.arange(0, BN)
    own_q = (row.to(tl.int64) * S * H + head) * HEAD
    own_k = (row.to(tl.int64) * T * H + head) * HEAD
    k_tile = _load(k + own_k, j, T, stride, HEAD, BLOCK_D)
    v_tile = _load(v + own_k, j, T, stride, HEAD, BLOCK_D)
    acc_k = tl.zeros((BN, BLOCK_D), tl.float32)
    acc_v = tl.zeros((BN, BLOCK_D), tl.float32)
    first, last = 0, S
    if CAUSAL:
        first = tl.maximum(start - (T - S), 0) // BM * BM
        if WINDOW:
            last = tl.minimum(start + BN - 1 + window - (T - S), S)
    for i0 in range(first, last, BM):
        i = i0 + tl.arange(0, BM)
        q_tile = _load(q + own_q, i, S, stride, HEAD, BLOCK_D)
        g = _load(d_out + own_q, i, S, stride, HEAD, BLOCK_D)
        lse = tl.load(log_sum + cell * S + i, mask=i < S, other=0.0)
        d = tl.load(delta + cell * S + i, mask=i < S, other=0.0)
        s, _ = _scores(q_tile, k_tile, i, j, row, head, table, classes, key_mask, S, T, C, window,
                       scale, CAUSAL, WINDOW, TABLE, KEYS, PRECISION)  # fmt: skip
        p = tl.exp(s - lse[:, None])
        dp = tl.dot(g, tl.trans(v_tile), input_precision=PRECISION)
        kept = p
        if MASK != "none":
            mask = _keep(i, j, cell, keep, seeds, S, T, threshold, keep_scale, MASK)
            kept = p * mask
            dp *= mask
        acc_v += tl.dot(tl.trans(kept.to(g.dtype)), g, input_precision=PRECISION)
        ds = p * (dp - d[:, None])
        acc_k += tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision=PRECISION)
    _store(dk + own_k, j, T, stride, acc_k * scale, HEAD, BLOCK_D)
    _store(dv + own_k, j, T, stride, acc_v, HEAD, BLOCK_D)


def _options(q: Tensor, k: Tensor, given: Any, *kernels: str) -> tuple[Any, ...]:
    """Return (the tuple of arguments that follow v in every kernel of this file, then for each of `kernels` the dict of
    its compile-time constants). A kernel is "forward", "query" (gradient of q) or "key" (gradients of k and v). q is
    [B, S, H, D], k [B, T, H, D]; `given` is attention's options, the `Given` of blocked_attention.py.
    """
    (_, S, H, D), T = q.shape, k.shape[1]
    table, key_mask, keep, seeds = given.table, given.key_mask, given.keep, given.seeds
    mask = "keep" if keep is not None else "seeds" if seeds is not None and given.p > 0 else "none"
    tensors = contiguous(table, given.classes, key_mask, keep, seeds)
    if key_mask is not None:
        tensors[2] = tensors[2].view(torch.uint8)
    C = 0 if table is None else table.shape[1]
    sizes = (S, T, H, C, given.window, given.scale, *threshold_and_scale(given.p))
    flags = {"CAUSAL": given.causal, "WINDOW": bool(given.window), "TABLE": table is not None,
             "KEYS": ("none", "", "keys", "pairs")[0 if key_mask is None else key_mask.ndim],
             "MASK": mask}  # fmt: skip
    flags["PRECISION"] = "ieee"
    plain = table is None and key_mask is None and mask == "none"
    of = (flags | tiles(kernel, D, table is not None, plain, mask) for kernel in kernels)
    return (*tensors, *sizes), *of


@cache
def tiles(kernel: str, head_size: int, table: bool, plain: bool, mask: str) -> dict[str, Any]:
    """Return the launch options with which a kernel spills no registers, found by `ci/bench.py launches`: {"BM": queries
    per tile, "BN": keys per tile, "HEAD": `head_size`, "BLOCK_D": power of 2 >= 16, "num_warps": ..., ...}.

    Args:
        kernel: "forward", "query" or "key".
        head_size: head dim D.
        table: whether a bias that depends on the distance is added to the scores.
        plain: whether attention has no bias table, key mask or dropout.
        mask: kind of dropout mask: "none", "keep" (a tensor) or "seeds" (hashed within the tile).
    """
    block = max(1 << (head_size - 1).bit_length(), 16)
    BM, BN, warps = 64, 32, 8
    if kernel == "query" and table:
        BM, warps = 32, 8 if block > 64 and mask != "none" else 4
    elif kernel == "key" and block > 64:
        BM, BN = 32, 16
    elif kernel == "key" and mask == "seeds" and not table:
        warps = 4
    elif kernel == "forward" and not table and block <= 64:
        BN, warps = 64 if plain else 32, 4
    sizes = {"BM": BM, "BN": BN, "HEAD": head_size, "BLOCK_D": block}
    return sizes | {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True}


def forward(q: Tensor, k: Tensor, v: Tensor, given: Any) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel for q [B, S, H, D], k and v [B, T, H, D]; return attention's output [B, S, H, D] and
    the log-sum-exp of its scores [B, H, S]. `given` has attention's options (the NamedTuple `Given` of
    blocked_attention.py): bias table, key mask, dropout mask or seeds, scale, causal, window.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, S, H, _ = q.shape
    out, log_sum = torch.empty_like(q), q.new_empty((B, H, S), dtype=torch.float32)
    if q.numel():
        args, own = _options(q, k, given, "forward")
        grid = (B * H, -(-S // own["BM"]))
        _forward_kernel[grid](out, log_sum, q, k, v, *args, **own)
    return out, log_sum


def backward(
    d_out: Tensor, out: Tensor, log_sum: Tensor, q: Tensor, k: Tensor, v: Tensor, given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward kernels for `d_out`, the gradient of attention's output `out`, both [B, S, H, D]. Return the
    gradients of q [B, S, H, D], k, v [B, T, H, D] and the bias table [H, C] (empty without one). `out` and `log_sum`
    [B, H, S] are what `forward` returned for this q, k, v and `given`, attention's options (the NamedTuple `Given` of
    blocked_attention.py: bias table, key mask, dropout, scale, causal, window).
    """
    d_out, q, k, v = (t.contiguous() for t in (d_out, q, k, v))
    (B, S, H, _), T = q.shape, k.shape[1]
    make = torch.empty_like if S else torch.zeros_like  # without queries no kernel runs
    dq, dk, dv = torch.empty_like(q), make(k), make(v)
    delta = torch.empty_like(log_sum)
    (args, by_query, by_key), table = _options(q, k, given, "query", "key"), given.table
    blocks, C = -(-S // by_query["BM"]), 0 if table is None else table.shape[1]
    partial = q.new_empty((B, H, blocks, C), dtype=torch.float32)
    if q.numel():
        given = (d_out, delta, log_sum, q, k, v, *args)
        sizes = {name: by_query[name] for name in ("HEAD", "BLOCK_D")}
        sizes |= {"BM": 4096 // sizes["BLOCK_D"], "num_warps": 4, "enable_fp_fusion": True}
        grid = (B * H, -(-S // sizes["BM"]))
        _delta_kernel[grid](delta, out.contiguous(), d_out, S, H, **sizes)
        classes_block = 1 << max(C - 1, 0).bit_length()
        _query_kernel[(B * H, blocks)](dq, partial, *given, **by_query, BLOCK_C=classes_block)
        _key_kernel[(B * H, -(-T // by_key["BN"]))](dk, dv, *given, **by_key)
    d_table = q.new_empty((0, 0)) if table is None else partial.sum((0, 2)).to(table.dtype)
    return dq, dk, dv, d_table
