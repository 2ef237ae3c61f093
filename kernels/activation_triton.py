"""Triton kernels of activation.py: tiles of [BLOCK_M, BLOCK_N], all arithmetic in fp32."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Launches pass options that are not in the kernel's signature, and numbers for constexpr.

import torch
import triton
import triton.language as tl
from torch import Tensor

from slapo_zoo.kernels.dropout_triton import contiguous, mask_of_tile, mask_options

BLOCK_M, BLOCK_N = 4, 512  # 16 elements per thread: four 16-byte loads in bf16
STRIPS = 64  # row strips of the backward; each has a partial sum of the bias gradient


@triton.jit
def _act(h, KIND: tl.constexpr):
    """Return the activation of h and its derivative; KIND is "gelu", "gelu_tanh", "relu" or "silu"."""
    if KIND == "relu":
        y = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
        d = tl.where(h > 0, 1.0, 0.0)
    elif KIND == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
        y = h * cdf
        d = cdf + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)
    elif KIND == "silu":
        s = tl.sigmoid(h)
        y = h * s
        d = s + y * (1.0 - s)
    else:
        t = 2.0 * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h)) - 1.0
        y = 0.5 * h * (1.0 + t)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * h * h)
        d = 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * inner
    return y, d


@triton.jit
def _forward_kernel(
    y, x, bias, up, keep, seeds, M, N, cell, threshold, scale,
    KIND: tl.constexpr, BIAS: tl.constexpr, UP: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    h = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    if BIAS:
        h += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out, _ = _act(h, KIND)
    if UP:
        out *= tl.load(up + at, mask=ok, other=0.0).to(tl.float32)
    if MASK != "none":
        out *= mask_of_tile(m, n, ok, M, N, keep, seeds, cell, threshold, scale, MASK)
    tl.store(y + at, out, mask=ok)


@triton.jit
def _backward_kernel(
    dx, dup, dbias, dy, x, bias, up, keep, seeds, M, N, cell, threshold, scale, rows,
    KIND: tl.constexpr, BIAS: tl.constexpr, UP: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x and up, and a partial sum of dbias, from `dy` [M, N] for a strip of `rows` rows and
    BLOCK_N columns. KIND names the activation, MASK where the dropout mask comes from: "keep", "seeds" (one for every
    `cell` rows; an element is dropped if its hash is below `threshold`, else multiplied by `scale`) or "none".
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(0) * rows
    total = tl.zeros((BLOCK_N,), tl.float32)
    b = tl.zeros((BLOCK_N,), tl.float32)
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    for first in range(begin, tl.minimum(begin + rows, M), BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < tl.minimum(begin + rows, M)) & (n[None, :] < N)
        at = m[:, None].to(tl.int64) * N + n[None, :]
        h = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) + b[None, :]
        g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
        if MASK != "none":
            g *= mask_of_tile(m, n, ok, M, N, keep, seeds, cell, threshold, scale, MASK)
        a, d = _act(h, KIND)
        if UP:
            tl.store(dup + at, g * a, mask=ok)
            g *= tl.load(up + at, mask=ok, other=0.0).to(tl.float32)
        g *= d
        tl.store(dx + at, g, mask=ok)
        total += tl.sum(g, 0)
    if BIAS:
        tl.store(dbias + tl.program_id(0).to(tl.int64) * N + n, total, mask=n < N)


def _options(x: Tensor, bias, up, keep, seeds, p: float, kind: str) -> tuple[tuple, dict]:
    M, N = x.shape
    mask, sizes = mask_options(M, keep, seeds, p)
    flags = {"KIND": kind, "BIAS": bias is not None, "UP": up is not None, "MASK": mask}
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": min(BLOCK_N, 1 << (N - 1).bit_length())}
    return (M, N, *sizes), flags | blocks | {
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def forward(
    x: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    kind: str,
) -> Tensor:
    """Launch the forward kernel; return mask * act(x + bias) * up for x and up [M, N]. `kind` names act. The dropout mask is
    `keep` [M, N] or, if that is None, hashed with probability `p` from `seeds` [n], one for every M / n rows.
    """
    x, bias, up, keep = contiguous(x, bias, up, keep)
    y = torch.empty_like(x)
    if y.numel():
        sizes, options = _options(x, bias, up, keep, seeds, p, kind)
        grid = (-(-sizes[0] // BLOCK_M), -(-sizes[1] // options["BLOCK_N"]))
        _forward_kernel[grid](y, x, bias, up, keep, seeds, *sizes, **options)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernel for y = mask * act(x + bias) * up with x and up [M, N], bias [N], given `dy`, the
    gradient of y. Return the gradients of x, bias and up (empty for a bias or up that is None). `kind` names act:
    "gelu", "gelu_tanh", "relu" or "silu". The dropout mask is `keep` [M, N] or, if that is None, hashed with
    probability `p` from `seeds` [n], one for every M / n rows; without seeds too there is no dropout.
    """
    dy, x, bias, up, keep = contiguous(dy, x, bias, up, keep)
    dx = torch.empty_like(x)
    dup = x.new_empty(0, x.shape[-1]) if up is None else torch.empty_like(up)
    strips = min(STRIPS, -(-len(x) // BLOCK_M))
    partial = x.new_empty((strips, x.shape[-1] if bias is not None else 0), dtype=torch.float32)
    if x.numel():
        sizes, options = _options(x, bias, up, keep, seeds, p, kind)
        rows = -(-sizes[0] // strips)
        grid = (strips, -(-sizes[1] // options["BLOCK_N"]))
        args = (dx, dup, partial, dy, x, bias, up, keep, seeds)
        _backward_kernel[grid](*args, *sizes, rows, **options)
    dbias = partial.sum(0).to(x.dtype if bias is None else bias.dtype)
    return dx, dbias, dup
