"""Triton kernels of norm.py: whole rows in registers, ROWS of them at a time."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Launches pass options that are not in the kernel's signature, and numbers for constexpr.

import torch
import triton
import triton.language as tl
from torch import Tensor

from slapo_zoo.kernels.dropout_triton import contiguous, mask_of_tile, mask_options

PROGRAMS = 264  # programs of the backward: two per multiprocessor of an H100; each has partial sums


@triton.jit
def _forward_kernel(
    y, z, means, rstds, x, weight, bias, x_bias, residual, keep, seeds,
    M, N, cell, threshold, scale, eps,
    RMS: tl.constexpr, BIAS: tl.constexpr, X_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    ok = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    h = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    if X_BIAS:
        h += tl.load(x_bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if MASK != "none":
        h *= mask_of_tile(m, n, ok, M, N, keep, seeds, cell, threshold, scale, MASK)
    if RESIDUAL:
        h += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    if X_BIAS or RESIDUAL or MASK != "none":
        tl.store(z + at, h, mask=ok)
        h = h.to(z.dtype.element_ty).to(tl.float32)  # the backward sees the rounded sum
    if RMS:
        centred = h
    else:
        mean = tl.sum(h, 1) / N
        centred = tl.where(ok, h - mean[:, None], 0.0)
        tl.store(means + m, mean, mask=m < M)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / N + eps)
    tl.store(rstds + m, rstd, mask=m < M)
    out = centred * rstd[:, None]
    out *= tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, out, mask=ok)


@triton.jit
def _backward_kernel(  # noqa: C901 - each branch is a constant when it is compiled
    d_sum, dx, dw, db, dx_bias, dy, dz, z, weight, means, rstds, keep, seeds,
    M, N, cell, threshold, scale,
    RMS: tl.constexpr, DZ: tl.constexpr, X_BIAS: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients `d_sum` of z and, with dropout, `dx` of x for z = mask * (x + x_bias) + residual and y =
    norm(z). Triton program i of k takes tiles i, i + k, ... of ROWS rows, and writes its sums over them to row i of
    `dw`, `db` (not if RMS) and `dx_bias` (if X_BIAS), each [k, N]. `dy` and `dz` (if DZ) are the gradients of y and z,
    `means` and `rstds` (1 / std) are [M]. MASK is "none", "keep" (the mask is `keep` [M, N]) or "seeds" (each of
    `seeds` is hashed for `cell` rows; hashes below `threshold` drop, others multiply by `scale`).
    """
    n = tl.arange(0, BLOCK_N)
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    sum_w = tl.zeros((BLOCK_N,), tl.float32)
    sum_b = tl.zeros((BLOCK_N,), tl.float32)
    sum_x = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        m = tile * ROWS + tl.arange(0, ROWS)
        ok = (m[:, None] < M) & (n[None, :] < N)
        at = m[:, None].to(tl.int64) * N + n[None, :]
        g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
        h = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + m, mask=m < M, other=0.0)[:, None]
        if RMS:
            normal = h * rstd
        else:
            mean = tl.load(means + m, mask=m < M, other=0.0)[:, None]
            normal = tl.where(ok, (h - mean) * rstd, 0.0)
            sum_b += tl.sum(g, 0)
        sum_w += tl.sum(g * normal, 0)
        g *= w
        along = tl.sum(g * normal, 1) / N
        d = g - normal * along[:, None]
        if not RMS:
            d -= (tl.sum(g, 1) / N)[:, None]
        d *= rstd
        if DZ:
            d += tl.load(dz + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(d_sum + at, d, mask=ok)
        if MASK != "none":
            d *= mask_of_tile(m, n, ok, M, N, keep, seeds, cell, threshold, scale, MASK)
            tl.store(dx + at, d, mask=ok)
        if X_BIAS:
            sum_x += tl.sum(d, 0)
    at = tl.program_id(0).to(tl.int64) * N + n
    tl.store(dw + at, sum_w, mask=n < N)
    if not RMS:
        tl.store(db + at, sum_b, mask=n < N)
    if X_BIAS:
        tl.store(dx_bias + at, sum_x, mask=n < N)


def tile(N: int) -> dict[str, int]:
    """Return launch options for rows of N elements: {"ROWS": rows per tile, "BLOCK_N": power of 2 >= 16, "num_warps": ...}."""
    block = 1 << (max(N, 16) - 1).bit_length()
    rows = max(1, 2048 // block)
    return {
        "ROWS": rows,
        "BLOCK_N": block,
        "num_warps": min(max(rows * block // 512, 4), 16),
        "enable_fp_fusion": True,
    }


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    residual: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel for z = mask * (x + x_bias) + residual and y = LayerNorm(z) or, with `rms`, RMSNorm(z);
    x is [M, N]. Return y, z [M, N], mean [M] and 1 / std [M]. z is empty without x_bias, residual and dropout, where it
    equals x; mean is empty with `rms`. The dropout mask is `keep` [M, N] or, if that is None, hashed with probability
    `p` from `seeds` [n], one for every M / n rows.
    """
    M, N = x.shape
    x, weight, bias, x_bias, residual, keep = contiguous(x, weight, bias, x_bias, residual, keep)
    mask, sizes = mask_options(M, keep, seeds, p)
    summed = x_bias is not None or residual is not None or mask != "none"
    y, z = torch.empty_like(x), x.new_empty((M if summed else 0, N))
    mean = x.new_empty(0 if rms else M, dtype=torch.float32)
    rstd = x.new_empty(M, dtype=torch.float32)
    if x.numel():
        options = tile(N)
        args = (y, z, mean, rstd, x, weight, bias, x_bias, residual, keep, seeds)
        _forward_kernel[(-(-M // options["ROWS"]),)](
            *args, M, N, *sizes, eps, RMS=rms, BIAS=bias is not None, X_BIAS=x_bias is not None,
            RESIDUAL=residual is not None, MASK=mask, **options,
        )  # fmt: skip
    return y, z, mean, rstd


def backward(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    rms: bool,
    has_x_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward kernel for z = mask * (x + x_bias) + residual and y = LayerNorm(z) or, with `rms`,
    RMSNorm(z), given their gradients `dz` (None: 0) and `dy`. Return the gradients of z, x [M, N], weight, bias and
    x_bias [N]: that of x is empty without dropout, where it equals that of z, that of bias with `rms`, that of x_bias
    unless `has_x_bias`. `mean` and `rstd` (1 / std) are from `forward`. The dropout mask is `keep` [M, N] or, if that
    is None, hashed with probability `p` from `seeds` [n], one for every M / n rows.
    """
    M, N = z.shape
    dy, dz, z, weight, keep = contiguous(dy, dz, z, weight, keep)
    mask, sizes = mask_options(M, keep, seeds, p)
    d_sum, dx = torch.empty_like(z), z.new_empty((M if mask != "none" else 0, N))
    options = tile(N)
    programs = min(PROGRAMS, -(-M // options["ROWS"]))
    counts = (N, 0 if rms else N, N if has_x_bias else 0)
    partial = [z.new_empty((programs, n), dtype=torch.float32) for n in counts]
    if z.numel():
        args = (d_sum, dx, *partial, dy, dz, z, weight, mean, rstd, keep, seeds)
        _backward_kernel[(programs,)](
            *args, M, N, *sizes, RMS=rms, DZ=dz is not None, X_BIAS=has_x_bias, MASK=mask, **options
        )
    dw, db, dx_bias = (t.sum(0).to(weight.dtype) for t in partial)
    return d_sum, dx, dw, db, dx_bias
