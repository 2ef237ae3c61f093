"""Kernel swiglu: y = silu(gate) * up, the gated feed-forward of the Llama family. N columns."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.kernel_registry import kernel, operator
from slapo_zoo.kernels.activation import activation
from slapo_zoo.kernels.linear import is_plain

SHAPES = [(7, 64), (15, 100), (32, 257), (0, 32)]
ROWS = 512  # per block of the backward, to stay in the cache
SILU = ("SiLU", "SiLUActivation")
SERVED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GraniteMLP", "Olmo2MLP")


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up in plain torch operations (arXiv:2002.05202; modeling_llama.py: LlamaMLP)."""
    return gate * torch.sigmoid(gate) * up


def inputs(M: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for gate [M, N]; `like` has dtype and device."""
    return {"gate": torch.randn(M, N, **like), "up": torch.randn(M, N, **like)}


def _forward(module: Any, x: Tensor) -> Tensor:
    gate, up, down = module.gate_proj(x), module.up_proj(x), module.down_proj
    if _recomputes(gate, up, down):
        return _down(gate, up, down.weight, down.bias)
    return down(swiglu(gate, up))


def _recomputes(gate: Tensor, up: Tensor, down: nn.Module) -> bool:
    """Return whether the backward may recompute silu(gate) * up: on a CPU, if `down` is a plain nn.Linear of their dtype."""
    if type(down) is not nn.Linear or not is_plain(down):
        return False
    same = gate.dtype == up.dtype == down.weight.dtype and gate.shape == up.shape
    return same and gate.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _cannot(module: Any) -> str:
    act = type(module.act_fn).__name__
    return "" if act in SILU else f"its activation is {act}, not silu"


@kernel(
    "swiglu", reference, inputs, SHAPES, cpu="F.silu, recomputed", cannot=_cannot,
    serves=dict.fromkeys(SERVED, _forward),
    passes=("act_fn",),
)  # fmt: skip
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up of two tensors [..., N] in one pass; only gate and up are saved for the backward."""
    return activation("swiglu", "silu", gate, up=up)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(gate, up, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple:
    for_weight, for_bias = ctx.needs_input_grad[2], ctx.has_bias and ctx.needs_input_grad[3]
    d_gate, d_up, dw, db = _down_backward(dy, *ctx.saved_tensors, for_weight, for_bias)
    return d_gate, d_up, dw if for_weight else None, db if for_bias else None


def _fake(gate, up, weight, bias):
    return gate.new_empty((*gate.shape[:-1], weight.shape[0]))


@operator("swiglu_linear", _fake, _setup, _gradients)
def _down(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute (silu(gate) * up) W^T + b, W being `weight`; only the arguments are saved for the backward."""
    rows = functional.silu(gate).mul_(up).view(-1, gate.shape[-1])
    return products.mm(rows, weight.t(), bias).view(*gate.shape[:-1], weight.shape[0])


def _fake_backward(dy, gate, up, weight, for_weight, for_bias):
    dw = weight.new_empty(weight.shape if for_weight else (0,))
    db = dy.new_empty(dy.shape[-1] if for_bias else 0)
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), dw, db


@operator("swiglu_linear_backward", _fake_backward)
def _down_backward(
    dy: Tensor, gate: Tensor, up: Tensor, weight: Tensor, for_weight: bool, for_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_rows, up_rows = (t.reshape(-1, t.shape[-1]) for t in (gate, up))
    g = dy.reshape(-1, dy.shape[-1])
    d_gate, d_up = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate_rows, up_rows)
    )
    dw = weight.new_zeros(weight.shape if for_weight else (0,))
    for i in range(0, len(g), ROWS):
        part = slice(i, i + ROWS)
        act = functional.silu(gate_rows[part])
        if for_weight:
            products.add_mm_(dw, g[part].t(), act * up_rows[part])
        d = products.mm(g[part], weight)
        torch.mul(act, d, out=d_up[part])
        torch.ops.aten.silu_backward.grad_input(
            d.mul_(up_rows[part]), gate_rows[part], grad_input=d_gate[part]
        )
    db = g.sum(0) if for_bias else dy.new_empty(0)
    return d_gate.view(gate.shape), d_up.view(gate.shape), dw, db
