"""Kernel relu_dropout: y = dropout(relu(x)), the activation of T5's feed-forward. B batch rows, N columns."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.activation import activation
from slapo_zoo.kernels.dropout import inputs
from slapo_zoo.kernels.dropout_mask import dropout_of, mask_like

SHAPES = [(1, 7, 64), (3, 5, 100), (2, 16, 257), (0, 4, 32)]


def reference(x: Tensor, seeds: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Compute relu(x), then dropout by one seed per batch row, in torch operations (modeling_t5: T5DenseActDense)."""
    y = torch.where(x > 0, x, torch.zeros_like(x))
    mask = mask_like(x, None, seeds, p)
    return y if mask is None else y * mask


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    h = module.wi(hidden_states)
    return module.wo(relu_dropout(h, **dropout_of(module.dropout, h)).to(module.wo.weight.dtype))


def _cannot(module: Any) -> str:
    act = type(module.act).__name__
    return "" if act == "ReLU" else f"its activation is {act}, not ReLU"


@kernel(
    "relu_dropout", reference, inputs, SHAPES, cpu="F.relu", cannot=_cannot,
    serves=dict.fromkeys(("T5DenseActDense", "MT5DenseActDense", "UMT5DenseActDense"), _forward),
    passes=("act", "dropout"),
)  # fmt: skip
def relu_dropout(
    x: Tensor, keep: Tensor | None = None, seeds: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """Compute relu(x) * mask in one pass, and its gradient in another. x is [B, ..., N]. The dropout mask is `keep`
    [B, ..., N], of 0 and 1/(1-p), or if that is None hashed with probability `p` from `seeds`, int64 [B].
    """
    return activation("relu_dropout", "relu", x, keep=keep, seeds=seeds, p=p)
