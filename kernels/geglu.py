"""Kernel geglu: y = dropout(gelu_new(gate) * up), the gated feed-forward of T5 v1.1. N columns."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.activation import activation
from slapo_zoo.kernels.bias_gelu import reference as gelu_reference
from slapo_zoo.kernels.dropout_mask import dropout_of, mask_like

SHAPES = [(1, 7, 64), (3, 5, 100), (2, 16, 257), (0, 4, 32)]
TANH = ("NewGELUActivation", "PytorchGELUTanh", "GELUTanh")


def reference(gate: Tensor, up: Tensor, seeds: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Compute gelu_tanh(gate) * up, then dropout with a seed per batch row (arXiv:2002.05202; T5DenseGatedActDense)."""
    y = gelu_reference(gate, approximate="tanh") * up
    mask = mask_like(gate, None, seeds, p)
    return y if mask is None else y * mask


def inputs(B: int, S: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for gate [B, S, N], dropout too; `like` has dtype and device."""
    gate, up = torch.randn(B, S, N, **like), torch.randn(B, S, N, **like)
    seeds = torch.randint(2**63 - 1, (B,), device=like.get("device"))
    return {"gate": gate, "up": up, "seeds": seeds, "p": 0.25}


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    gate, up = module.wi_0(hidden_states), module.wi_1(hidden_states)
    y = geglu(gate, up, **dropout_of(module.dropout, gate))
    return module.wo(y.to(module.wo.weight.dtype))  # flan-t5-xxl keeps wo in fp32


def _cannot(module: Any) -> str:
    act = type(module.act).__name__
    return "" if act in TANH else f"its activation is {act}, not gelu_new"


@kernel(
    "geglu", reference, inputs, SHAPES, cpu="F.gelu, mul", cannot=_cannot,
    serves=dict.fromkeys(("T5DenseGatedActDense", "MT5DenseGatedActDense", "UMT5DenseGatedActDense"), _forward),
    passes=("act", "dropout"),
)  # fmt: skip
def geglu(
    gate: Tensor,
    up: Tensor,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute gelu_tanh(gate) * up * mask in one pass, and its gradients in another. gate and up are [B, ..., N]. The
    dropout mask is `keep` [B, ..., N] of 0 and 1/(1-p), or if None hashed with probability `p` from `seeds`, int64 [B].
    """
    return activation("geglu", "gelu_tanh", gate, None, up, keep, seeds, p)
