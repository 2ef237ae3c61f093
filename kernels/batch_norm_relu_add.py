"""Kernel batch_norm_relu_add: y = relu(BatchNorm(x) + residual), channels last. B images, C channels, M = B*h*w.

Statistics are those of the batch in training, and the running ones in eval().
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.choose_kernel import in_triton, runs_triton
from slapo_zoo.dispatch.kernel_registry import kernel, operator
from slapo_zoo.kernels.linear import is_plain, linear

SHAPES = [(1, 3, 5, 5), (3, 10, 7, 5), (2, 33, 8, 8), (0, 4, 3, 3)]


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute relu(BatchNorm(x) + residual) of x [B, C, h, w] in plain torch operations (arXiv:1502.03167,
    arXiv:1603.05027); weight, bias and running statistics are [C].
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if training or running_mean is None or running_var is None:
        mean = wide.mean((0, 2, 3))
        var = (wide - mean[:, None, None]).pow(2).mean((0, 2, 3))
    else:
        mean, var = running_mean.to(wide), running_var.to(wide)
    scale = weight * torch.rsqrt(var + eps)
    y = (wide - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]
    y = y if residual is None else y + residual
    return torch.where(y > 0, y, torch.zeros_like(y)).to(x.dtype)


def inputs(B: int, C: int, h: int, w: int, **like: Any) -> dict[str, Any]:
    """Return random arguments {name: value} of the kernel batch_norm_relu_add for x [B, C, h, w]; for an empty batch (B
    = 0) also running statistics and training=False. `like` has dtype and device.
    """
    x, residual = (torch.randn(B, C, h, w, **like) for _ in range(2))
    last = torch.channels_last
    given = {"x": x.to(memory_format=last) * 2 + 1, "residual": residual.to(memory_format=last),
             "weight": torch.randn(C, **like), "bias": torch.randn(C, **like)}  # fmt: skip
    if B:
        return given
    kept = {"running_mean": torch.zeros(C, **like), "running_var": torch.ones(C, **like)}
    return given | kept | {"training": False}


def _forward(module: Any, x: Tensor) -> Tensor:
    """Run the forward of slapo_zoo's own WideResNetBottleneck on x [B, C, h, w] with the kernel batch_norm_relu_add."""
    x = x.contiguous(memory_format=module.format)
    y = _norm(module.bn1, _conv(module.conv1, x))
    y = _norm(module.bn2, module.conv2(y))
    return _norm(
        module.bn3, _conv(module.conv3, y), x if module.downsample is None else module.downsample(x)
    )


def _conv(conv: Any, x: Tensor) -> Tensor:
    """Run the module `conv` on x; a 1x1 convolution is computed as a matrix product where that is faster on a CPU."""
    rows = x.permute(0, 2, 3, 1)
    if not _is_product(conv) or not _multiplies_faster(rows, conv.weight):
        return conv(x)
    multiply = linear if x.dtype == torch.float32 else functional.linear
    return multiply(rows, conv.weight.flatten(1)).permute(0, 3, 1, 2)


def _is_product(conv: Any) -> bool:
    one = conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1
    return one and conv.bias is None and is_plain(conv) and "forward" not in vars(conv)


def _multiplies_faster(rows: Tensor, weight: Tensor) -> bool:
    if rows.device.type != "cpu" or rows.dtype != weight.dtype or not rows.is_contiguous():
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    wide = products.suits(rows.flatten(0, 2), weight.flatten(1).t())
    return wide or rows.dtype == torch.bfloat16


def _norm(bn: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    if bn._forward_hooks or bn._forward_pre_hooks:  # hooks need its output
        y = bn(x)
        return (y if residual is None else y + residual).relu()
    if not _is_plain(bn) or not runs_triton("batch_norm_relu_add", x):
        return _in_place(bn(x), residual)
    if bn.training and bn.num_batches_tracked is not None:
        bn.num_batches_tracked.add_(1)
    training = bn.training or bn.running_mean is None
    args = (residual, bn.running_mean, bn.running_var, training, bn.momentum, bn.eps)
    return batch_norm_relu_add(x, bn.weight, bn.bias, *args)


def _is_plain(bn: Any) -> bool:
    """Return whether the kernel may replace BatchNorm `bn`: if it has a weight, a momentum and no replaced forward."""
    was_changed = "forward" in bn.__dict__
    return not was_changed and bn.momentum is not None and bn.weight is not None


def _in_place(y: Tensor, residual: Tensor | None) -> Tensor:
    """Compute relu(y + residual) in the memory of y, which BatchNorm's backward does not read."""
    return (y if residual is None else y.add_(residual)).relu_()


@kernel(
    "batch_norm_relu_add", reference, inputs, SHAPES, cpu="F.batch_norm, in place",
    serves={"WideResNetBottleneck": _forward}, passes=("relu", "conv1", "conv3", "bn1", "bn2", "bn3"),
)  # fmt: skip
def batch_norm_relu_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute relu(BatchNorm(x) + residual) of x [B, C, h, w], channels last in memory; `residual` has the shape of x,
    or is None. `weight`, `bias` and, if not None, `running_mean` and `running_var` are [C]. With `training` the
    statistics of the batch are used, and update the running ones with weight `momentum`; else the running ones are
    used. `eps` is added to the variance.
    """
    if not runs_triton("batch_norm_relu_add", x):
        statistics = (running_mean, running_var)
        y = functional.batch_norm(x, *statistics, weight, bias, training, momentum, eps)
        return _in_place(y, residual)
    rows = [
        None if t is None else t.permute(0, 2, 3, 1).reshape(-1, x.shape[1]) for t in (x, residual)
    ]
    given = (None, None) if training else (running_mean, running_var)
    y, mean, _, var = _apply(rows[0], weight, bias, rows[1], *given, eps)
    if training and running_mean is not None and running_var is not None:
        M = x.numel() // max(x.shape[1], 1)
        running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        running_var.lerp_((var.detach() * (M / max(M - 1, 1))).to(running_var.dtype), momentum)
    B, C, h, w = x.shape
    return y.view(B, h, w, C).permute(0, 3, 1, 2)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, residual, mean, _, _ = inputs
    y, mean_used, rstd, var = output
    ctx.training, ctx.has_residual = mean is None, residual is not None
    ctx.mark_non_differentiable(mean_used, rstd, var)
    ctx.save_for_backward(x, weight, y, mean_used, rstd)


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple:
    dx, dw, db, d_residual = _backward(dy, *ctx.saved_tensors, ctx.training, ctx.has_residual)
    return dx, dw, db, d_residual if ctx.has_residual else None, None, None, None


def _fake(x, weight, bias, residual, mean, var, eps):
    stat = weight.new_empty(x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape), stat, torch.empty_like(stat), torch.empty_like(stat)


@operator("batch_norm_relu_add", _fake, _setup, _gradients)
def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the Triton forward on rows [M, C]. Return y, and the mean, 1 / std and variance [C] that were used: the
    running statistics `mean` and `var`, or those of the rows if `mean` is None.
    """
    if not in_triton(x):
        hint = "call the function batch_norm_relu_add(), which then runs torch"
        raise NotImplementedError(f"no Triton for {x.dtype} on {x.device}: {hint}")
    from slapo_zoo.kernels import batch_norm_triton

    return batch_norm_triton.forward(x, weight, bias, residual, mean, var, eps)


def _fake_backward(dy, x, weight, y, mean, rstd, training, has_residual):
    d_residual = x.new_empty(x.shape if has_residual else (0, x.shape[1]))
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(weight), d_residual


@operator("batch_norm_relu_add_backward", _fake_backward)
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from slapo_zoo.kernels import batch_norm_triton

    return batch_norm_triton.backward(dy, x, weight, y, mean, rstd, training, has_residual)
