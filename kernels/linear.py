"""Kernel linear: y = x W^T + b; in fp32 on a CPU oneDNN computes it where oneDNN is faster than MKL (AMD CPUs).

It replaces the forward of nn.Linear, and of GPT-2's Conv1D, whose weight is [K, N].
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.kernel_registry import HOOKS, operator, register_kernel

SHAPES = [(7, 24, 10), (5, 33, 16), (64, 16, 1), (0, 8, 4)]


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x W^T + b in plain torch operations, as torch.nn.Linear does."""
    return x @ weight.T + bias


def inputs(M: int, K: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments for x [M, K] and weight [N, K]; `like` has dtype and device."""
    x, weight = torch.randn(M, K, **like), torch.randn(N, K, **like)
    return {"x": x, "weight": weight, "bias": torch.randn(N, **like)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, a tensor [..., N], for x [..., K], weight W [N, K] and bias b [N] or None."""
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return _apply(x, weight, bias, False)


def _forward(module: Any, x: Tensor) -> Tensor:
    """Run the forward of `module`, an nn.Linear or a Conv1D, on x with the kernel `linear`."""
    weight, in_first = module.weight, hasattr(module, "nf")
    if not _serves(x, weight, in_first):
        return type(module).forward(module, x)
    return _apply(x, weight, module.bias, in_first)


def _serves(x: Tensor, weight: Tensor, in_first: bool) -> bool:
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
    if not plain or torch.is_autocast_enabled("cpu") or x.dim() < 2:
        return False
    b = weight if in_first else weight.t()
    return products.suits(x, b, x.numel() // max(x.shape[-1], 1))


def is_plain(module: nn.Module) -> bool:
    """Return whether a linear has no hooks and computes x W^T + b, so that a kernel may use its weight directly."""
    own = products.computes_as_class(vars(module).get("forward"))
    return own and not any(getattr(module, name) for name in HOOKS)


def _install(site: Any, **options: Any) -> None:
    """Replace the forward of `site.module`, an nn.Linear or Conv1D of the model, by `_forward` if oneDNN is faster than
    MKL on this CPU. Keep a forward that sharding has set (row-parallel: bias after all-reduce). Ignore `options`.
    """
    if products.is_faster_here() and "forward" not in vars(site.module):
        site.module.forward = _forward.__get__(site.module)


products.AS_CLASS.add(_forward)
register_kernel(
    "linear", serves=dict.fromkeys(("Linear", "Conv1D"), _forward), entry=linear, innermost=True,
    reference=reference, inputs=inputs, shapes=tuple(SHAPES), paths={"cpu": "oneDNN where it is faster"},
)(_install)  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.in_first = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple:
    for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
    for_bias = for_bias and ctx.has_bias
    found = _backward(dy, *ctx.saved_tensors, ctx.in_first, for_x, for_weight, for_bias)
    wanted = (for_x, for_weight, for_bias)
    return *(g if want else None for g, want in zip(found, wanted, strict=True)), None


def _fake(x, weight, bias, in_first):
    return x.new_empty((*x.shape[:-1], weight.shape[1 if in_first else 0]))


@operator("linear", _fake, _setup, _gradients)
def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, in_first: bool) -> Tensor:
    b = weight if in_first else weight.t()
    return products.mm(x.reshape(-1, x.shape[-1]), b, bias).view(*x.shape[:-1], b.shape[1])


def _fake_backward(dy, x, weight, in_first, for_x, for_weight, for_bias):
    dx = x.new_empty(x.shape if for_x else (0,))
    dw = weight.new_empty(weight.shape if for_weight else (0,))
    return dx, dw, dy.new_empty(dy.shape[-1] if for_bias else 0)


@operator("linear_backward", _fake_backward)
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    in_first: bool,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(dy.shape[:-1])
    g, x_rows = dy.reshape(rows, dy.shape[-1]), x.reshape(rows, x.shape[-1])
    dx, dw, db = x.new_empty(0), weight.new_empty(0), dy.new_empty(0)
    if for_x:
        dx = products.mm(g, weight.t() if in_first else weight).view(x.shape)
    if for_weight:
        dw = products.mm(x_rows.t(), g) if in_first else products.mm(g.t(), x_rows)
    if for_bias:
        db = g.sum(0)
    return dx, dw, db
