"""Operator of layer_norm, rms_norm, bias_dropout_residual_layer_norm and embedding_layer_norm.

    z = mask * (x + x_bias) + residual;   y = (z - mean) * rstd * weight + bias

RMSNorm leaves out the mean. Statistics are in fp32. The backward is one pass, in which each Triton program sums over
some rows; the partial sums are then added in a fixed order. x is [M, N].
"""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.choose_kernel import in_triton
from slapo_zoo.dispatch.kernel_registry import operator
from slapo_zoo.kernels.dropout_mask import mask_like

MOST_COLUMNS = 8192  # longer rows spill registers


def fits_registers(columns: int, x_bias: bool) -> bool:
    """Return whether a norm's backward can hold sums over rows (dw, db, with `x_bias` dx_bias, [columns]) in registers."""
    return columns <= (MOST_COLUMNS // 2 if x_bias else MOST_COLUMNS)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool = False,
    x_bias: Tensor | None = None,
    residual: Tensor | None = None,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute (y, z) in the shape of x [..., N]: z = mask * (x + x_bias) + residual, where an argument that is None is
    left out, and y = LayerNorm(z) with `weight` and `bias` [N]; with `rms` RMSNorm(z), which subtracts no mean.
    `x_bias` is [N], `residual` [..., N]; `eps` is added to the variance. The dropout mask is `keep` [..., N], of 0 and
    1/(1-p), or if that is None hashed with probability `p` from `seeds`, int64, one per batch row.
    """
    if x_bias is not None and not fits_registers(x.shape[-1], True):
        x, x_bias = x + x_bias, None
    rows = (None if t is None else t.reshape(-1, x.shape[-1]) for t in (x, residual, keep))
    x_MN, residual_MN, keep_MN = rows
    arguments = (x_MN, weight, bias, x_bias, residual_MN, keep_MN, seeds, p, eps, rms)
    y, z, _, _ = _forward(*arguments)
    return y.view(x.shape), z.view(x.shape) if _has_sum(arguments) else x


def _has_sum(arguments: tuple) -> bool:
    """Return whether z = mask * (x + x_bias) + residual differs from x: whether `arguments`, the tuple of all arguments
    of `_forward`, have an x_bias, a residual or dropout.
    """
    _, _, _, x_bias, residual, keep, seeds, p, _, _ = arguments
    dropped = keep is not None or (seeds is not None and p > 0)
    return x_bias is not None or residual is not None or dropped


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, x_bias, residual, keep, seeds, ctx.p, _, ctx.rms = inputs
    _, z, mean, rstd = output
    ctx.given = (x_bias is not None, residual is not None, bias is not None)
    ctx.summed = _has_sum(inputs)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(z if ctx.summed else x, weight, mean, rstd, keep, seeds)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dz: Tensor | None, *_: Any) -> tuple:
    z, weight, mean, rstd, keep, seeds = ctx.saved_tensors
    has_x_bias, has_residual, has_bias = ctx.given
    dy = torch.zeros_like(z) if dy is None else dy
    dz = dz if ctx.summed else None
    args = (dy, dz, z, weight, mean, rstd, keep, seeds, ctx.p, ctx.rms, has_x_bias)
    d_sum, dx, dw, db, dx_bias = _backward(*args)
    dropped = keep is not None or (seeds is not None and ctx.p > 0)
    return (
        dx if dropped else d_sum, dw, db if has_bias else None, dx_bias if has_x_bias else None,
        d_sum if has_residual else None, *[None] * 5,
    )  # fmt: skip


def _fake(x, weight, bias, x_bias, residual, keep, seeds, p, eps, rms):
    summed = _has_sum((x, weight, bias, x_bias, residual, keep, seeds, p, eps, rms))
    z = x.new_empty(x.shape if summed else (0, x.shape[1]))
    wide = torch.promote_types(x.dtype, torch.float32)
    stat = x.new_empty(x.shape[0], dtype=wide)
    return x.new_empty(x.shape), z, stat.new_empty(0) if rms else stat, torch.empty_like(stat)


@operator("norm", _fake, _setup, _gradients)
def _forward(
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
    if in_triton(x):
        from slapo_zoo.kernels import norm_triton

        return norm_triton.forward(x, weight, bias, x_bias, residual, keep, seeds, p, eps, rms)
    z = summed(x, x_bias, residual, mask_like(x, keep, seeds, p))
    wide = torch.promote_types(x.dtype, torch.float32)
    if rms:
        mean = z.new_empty(0, dtype=wide)
        square = torch.linalg.vector_norm(z, dim=-1, dtype=wide).square_()
        rstd = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        y = (z * rstd[:, None]).mul_(weight).to(x.dtype)
    else:
        w, b = _wide(wide, weight, bias)
        y, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], w, b, eps)
        mean, rstd = mean[:, 0].to(wide), rstd[:, 0].to(wide)
    return y, x.new_empty(0, x.shape[1]) if z is x else z, mean, rstd


def summed(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Compute mask * (x + x_bias) + residual in as few passes as torch allows."""
    x = x if x_bias is None else x + x_bias
    if mask is None:
        return x if residual is None else x + residual
    return x * mask if residual is None else torch.addcmul(residual, x, mask)


def _wide(dtype: torch.dtype, *tensors: Tensor | None) -> list:
    """Return the tensors cast to `dtype` (fp32), in which torch's LayerNorm then computes its statistics; None stays None."""
    return [None if t is None else t.to(dtype) for t in tensors]


def _fake_backward(dy, dz, z, weight, mean, rstd, keep, seeds, p, rms, has_x_bias):
    dropped = keep is not None or (seeds is not None and p > 0)
    dx = z.new_empty(z.shape if dropped else (0, z.shape[1]))
    n = weight.shape[0]
    db = weight.new_empty(0 if rms else n)
    return (
        z.new_empty(z.shape),
        dx,
        weight.new_empty(n),
        db,
        weight.new_empty(n if has_x_bias else 0),
    )


@operator("norm_backward", _fake_backward)
def _backward(
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
    """Return the gradients of z, x, weight, bias and x_bias for z = mask * (x + x_bias) + residual and y = LayerNorm(z)
    or, with `rms`, RMSNorm(z). z and x are [M, N], the others [N]. The gradient of x is empty without dropout, where it
    equals that of z; that of bias is empty with `rms`, that of x_bias unless `has_x_bias`. `dy` and `dz` (None: 0) are
    the gradients of y and z; `mean` (unused if `rms`) and `rstd` = 1 / std are [M]. The dropout mask is `keep` [M, N]
    or, if that is None, hashed with probability `p` from `seeds` [n], one for every M / n rows.
    """
    if in_triton(z):
        from slapo_zoo.kernels import norm_triton

        return norm_triton.backward(dy, dz, z, weight, mean, rstd, keep, seeds, p, rms, has_x_bias)
    n, wide = z.shape[-1], rstd.dtype
    w = weight.to(wide)
    about = (torch.zeros_like(rstd) if rms else mean)[:, None]
    d_sum, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy.contiguous(), z.contiguous(), [n], about, rstd[:, None], w, torch.zeros_like(w),
        [True, True, not rms],
    )  # fmt: skip
    if rms:  # LayerNorm's backward also subtracts the mean of dy * weight: add it back
        average = torch.mv(dy, weight.to(dy.dtype)).to(wide).mul_(rstd / n)
        d_sum.add_(average[:, None])
    if dz is not None:
        d_sum = d_sum.add_(dz)
    mask = mask_like(z, keep, seeds, p)
    dx = z.new_empty(0, n) if mask is None else d_sum * mask
    dx_bias = (d_sum if mask is None else dx).sum(0) if has_x_bias else w.new_empty(0)
    db = w.new_empty(0) if rms else db
    dw, db, dx_bias = (t.to(weight.dtype) for t in (dw, db, dx_bias))
    return d_sum, dx, dw, db, dx_bias
