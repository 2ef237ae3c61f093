"""Operator y = mask * act(x + bias) * up, which the kernels bias_gelu, bias_relu, geglu, swiglu and relu_dropout call.

The forward reads its inputs once. The backward, also one pass, recomputes the activation and sums the bias gradient,
first within each strip of rows and then over strips, in a fixed order. x is [M, N].
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch.choose_kernel import in_triton, runs_triton
from slapo_zoo.dispatch.kernel_registry import operator
from slapo_zoo.kernels.dropout import dropout
from slapo_zoo.kernels.dropout_mask import mask_like


def activation(
    name: str,
    kind: str,
    x: Tensor,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute mask * act(x + bias) * up, without the factors and the bias that are None; `mask` is a dropout mask.

    Args:
        name: name of the calling kernel ("geglu", ...): its Triton kernel runs where measurements found it faster.
        kind: "gelu" (erf), "gelu_tanh", "relu" or "silu".
        x: [..., N].
        bias: [N].
        up: second factor [..., N] of a gated feed-forward.
        keep: dropout mask [..., N] of 0 and 1/(1-p).
        seeds: int64, one per batch row; the mask is hashed from them when `keep` is None.
        p: dropout probability.
    """
    recomputes = kind == "silu" and not x.is_cuda  # as fast on a CPU, and act(x) is not saved
    if not runs_triton(name, x) and not recomputes:
        return dropout(_plain(kind, x, bias, up), keep, seeds, p)
    rows = (None if t is None else t.reshape(-1, x.shape[-1]) for t in (x, up, keep))
    x_MN, up_MN, keep_MN = rows
    return _forward(x_MN, bias, up_MN, keep_MN, seeds, p, kind).view(x.shape)


def _act(kind: str, x: Tensor) -> Tensor:
    if kind == "relu":
        return functional.relu(x)
    if kind == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _plain(kind: str, x: Tensor, bias: Tensor | None, up: Tensor | None) -> Tensor:
    """Compute act(x + bias) * up by torch's operators with autograd; `kind` names act."""
    y = _act(kind, x if bias is None else x + bias)
    return y if up is None else y * up


def _through_act(kind: str, dy: Tensor, h: Tensor, ours: bool) -> Tensor:
    """Return the gradient of h for `dy`, the gradient of act(h), in torch operations; `kind` names act.

    `ours` is True if no other code reads `dy`, whose memory then holds the result.
    """
    into = dy if ours else torch.empty_like(dy)
    if kind == "relu":
        return torch.mul(dy, h > 0, out=into)
    if kind == "silu":
        return torch.ops.aten.silu_backward.grad_input(dy, h, grad_input=into)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward.grad_input(dy, h, approximate=approximate, grad_input=into)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, up, keep, seeds, ctx.p, ctx.kind = inputs
    ctx.save_for_backward(x, bias, up, keep, seeds)


def _gradients(ctx: Any, dy: Tensor) -> tuple:
    x, bias, up, keep, seeds = ctx.saved_tensors
    dx, dbias, dup = _backward(dy, x, bias, up, keep, seeds, ctx.p, ctx.kind)
    return (dx, None if bias is None else dbias, None if up is None else dup, *[None] * 4)


@operator(
    "activation", lambda x, *rest: x.new_empty(x.shape), setup=_setup, backward=_gradients
)  # fmt: skip
def _forward(
    x: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    kind: str,
) -> Tensor:
    if in_triton(x):
        from slapo_zoo.kernels import activation_triton

        return activation_triton.forward(x, bias, up, keep, seeds, p, kind)
    y = _act(kind, x if bias is None else x + bias)
    for factor in (up, mask_like(x, keep, seeds, p)):
        y = y if factor is None else y.mul_(factor)
    return y.contiguous()


def _fake_backward(dy, x, bias, up, keep, seeds, p, kind):
    dbias = x.new_empty(0 if bias is None else x.shape[-1])
    dup = x.new_empty(x.shape if up is not None else (0, x.shape[-1]))
    return x.new_empty(x.shape), dbias, dup


@operator("activation_backward", _fake_backward)
def _backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    keep: Tensor | None,
    seeds: Tensor | None,
    p: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if in_triton(x):
        from slapo_zoo.kernels import activation_triton

        return activation_triton.backward(dy, x, bias, up, keep, seeds, p, kind)
    mask = mask_like(x, keep, seeds, p)
    dy = dy if mask is None else dy * mask
    h = x if bias is None else x + bias
    dup = x.new_empty(0, x.shape[-1]) if up is None else _act(kind, h).mul_(dy)
    dx = _through_act(kind, dy if up is None else dy * up, h, not (up is None and mask is None))
    dbias = x.new_empty(0) if bias is None else dx.sum(0)
    return dx.contiguous(), dbias, dup.contiguous()
