"""Triton kernels of batch_norm_relu_add.py: rows [M, C], tiles of rows by channels, fp32 statistics."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Launches pass options that are not in the kernel's signature, and numbers for constexpr.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_C = 16, 128
STRIPS = 128  # row strips, whose partial sums are added in a fixed order


@triton.jit
def _statistics_kernel(means, squares, x, M, C, rows, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute per strip of `rows` rows each channel's mean and sum of squared deviations, [strips, C] (Chan et al. 1979)."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.program_id(0) * rows
    end = tl.minimum(begin + rows, M)
    mean = tl.zeros((BLOCK_C,), tl.float32)
    square = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < end) & (c[None, :] < C)
        at = m[:, None].to(tl.int64) * C + c[None, :]
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        had = (first - begin).to(tl.float32)
        new = (tl.minimum(first + BLOCK_M, end) - first).to(tl.float32)
        own = tl.sum(v, 0) / new
        centred = tl.where(ok, v - own[None, :], 0.0)
        step = own - mean
        mean += step * new / (had + new)
        square += tl.sum(centred * centred, 0) + step * step * had * new / (had + new)
    at = tl.program_id(0).to(tl.int64) * C + c
    tl.store(means + at, mean, mask=c < C)
    tl.store(squares + at, square, mask=c < C)


@triton.jit
def _apply_kernel(
    y, x, residual, means, rstds, weight, bias, M, C,
    ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = (m[:, None] < M) & (c[None, :] < C)
    at = m[:, None].to(tl.int64) * C + c[None, :]
    scale = tl.load(rstds + c, mask=c < C, other=0.0)
    scale *= tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    mean = tl.load(means + c, mask=c < C, other=0.0)
    shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    v = (v - mean[None, :]) * scale[None, :] + shift[None, :]
    if ADD:
        v += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + at, tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL), mask=ok)


@triton.jit
def _sums_kernel(
    dw, db, dy, x, y, means, rstds, M, C, rows, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.program_id(0) * rows
    end = tl.minimum(begin + rows, M)
    mean = tl.load(means + c, mask=c < C, other=0.0)
    rstd = tl.load(rstds + c, mask=c < C, other=0.0)
    sum_w = tl.zeros((BLOCK_C,), tl.float32)
    sum_b = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < end) & (c[None, :] < C)
        at = m[:, None].to(tl.int64) * C + c[None, :]
        g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
        g = tl.where(tl.load(y + at, mask=ok, other=0.0) > 0, g, 0.0)
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        sum_b += tl.sum(g, 0)
        sum_w += tl.sum(g * (v - mean[None, :]) * rstd[None, :], 0)
    at = tl.program_id(0).to(tl.int64) * C + c
    tl.store(dw + at, sum_w, mask=c < C)
    tl.store(db + at, sum_b, mask=c < C)


@triton.jit
def _gradient_kernel(
    dx, d_residual, dy, x, y, means, rstds, weight, dw, db, M, C,
    TRAINING: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = (m[:, None] < M) & (c[None, :] < C)
    at = m[:, None].to(tl.int64) * C + c[None, :]
    rstd = tl.load(rstds + c, mask=c < C, other=0.0)
    scale = rstd * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
    g = tl.where(tl.load(y + at, mask=ok, other=0.0) > 0, g, 0.0)
    if ADD:
        tl.store(d_residual + at, g, mask=ok)
    if TRAINING:
        mean = tl.load(means + c, mask=c < C, other=0.0)
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        normal = (v - mean[None, :]) * rstd[None, :]
        sum_w = tl.load(dw + c, mask=c < C, other=0.0) / M
        sum_b = tl.load(db + c, mask=c < C, other=0.0) / M
        g -= sum_b[None, :] + normal * sum_w[None, :]
    tl.store(dx + at, g * scale[None, :], mask=ok)


def _blocks(C: int) -> dict[str, int]:
    block = min(BLOCK_C, triton.next_power_of_2(max(C, 1)))
    return {"BLOCK_M": BLOCK_M, "BLOCK_C": block, "num_warps": 4, "enable_fp_fusion": True}


def _strips(M: int, C: int, options: dict[str, int]) -> tuple[tuple[int, int], int]:
    """Return (grid, rows per strip) for x [M, C] in strips of rows; the grid is (strips, tiles of options["BLOCK_C"] columns)."""
    rows = triton.cdiv(triton.cdiv(M, STRIPS), BLOCK_M) * BLOCK_M
    return (triton.cdiv(M, rows), triton.cdiv(C, options["BLOCK_C"])), rows


def _mean_var(x: Tensor) -> tuple[Tensor, Tensor]:
    M, C = x.shape
    grid, rows = _strips(M, C, options := _blocks(C))
    means, squares = (x.new_empty((grid[0], C), dtype=torch.float32) for _ in range(2))
    _statistics_kernel[grid](means, squares, x, M, C, rows, **options)
    counts = torch.full((grid[0], 1), float(rows), device=x.device)
    counts[-1] = M - (grid[0] - 1) * rows
    mean = (means * counts).sum(0) / M
    return mean, (squares + (means - mean).square() * counts).sum(0) / M


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernels on rows [M, C]; return y, and the mean, 1 / std and variance [C] used to normalise.
    These are the running statistics `mean` and `var`, or those of the rows if `mean` is None.
    """
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    M, C = x.shape
    y = torch.empty_like(x)
    if mean is None or var is None:
        mean, var = _mean_var(x) if x.numel() else (x.new_zeros(C).float(), x.new_zeros(C).float())
    mean, var = (t.to(torch.float32, copy=True) for t in (mean, var))  # outputs must be new tensors
    rstd = torch.rsqrt(var + eps)
    if x.numel():
        options = _blocks(C)
        grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(C, options["BLOCK_C"]))
        args = (y, x, residual, mean, rstd, weight.contiguous(), bias.contiguous(), M, C)
        _apply_kernel[grid](*args, ADD=residual is not None, **options)
    return y, mean, rstd, var


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward of y = relu(norm(x) * weight + bias + residual) for `dy`; return the gradients of x [M, C], weight,
    bias and residual (empty without one). `y`, `mean` and `rstd` (1 / std) come from `forward`; `training` says that
    `mean` and `rstd` are statistics of x, through which gradients flow too.
    """
    dy, x, y, weight = (t.contiguous() for t in (dy, x, y, weight))
    M, C = x.shape
    dx, d_residual = torch.empty_like(x), x.new_empty((M if has_residual else 0, C))
    if not x.numel():
        return dx, torch.zeros_like(weight), torch.zeros_like(weight), d_residual
    grid, rows = _strips(M, C, options := _blocks(C))
    parts = [x.new_empty((grid[0], C), dtype=torch.float32) for _ in range(2)]
    _sums_kernel[grid](*parts, dy, x, y, mean, rstd, M, C, rows, **options)
    dw, db = (t.sum(0) for t in parts)
    args = (dx, d_residual, dy, x, y, mean, rstd, weight, dw, db, M, C)
    grid = (triton.cdiv(M, BLOCK_M), grid[1])
    _gradient_kernel[grid](*args, TRAINING=training, ADD=has_residual, **options)
    return dx, dw.to(weight.dtype), db.to(weight.dtype), d_residual
