"""Kernel bias_relu: y = relu(x + bias). N columns."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.activation import activation

SHAPES = [(1, 64), (63, 100), (9, 1025), (0, 32)]


def reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute relu(x + bias) in torch operations, as OPT's feed-forward (modeling_opt.py) does."""
    h = x if bias is None else x + bias
    return torch.where(h > 0, h, torch.zeros_like(h))


def inputs(M: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for x [M, N]; `like` has dtype and device."""
    return {"x": torch.randn(M, N, **like), "bias": torch.randn(N, **like)}


def _forward(module: Any, x: Tensor) -> Tensor:
    return bias_relu(x)


@kernel("bias_relu", reference, inputs, SHAPES, serves={"ReLU": _forward}, cpu="F.relu")
def bias_relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute relu(x + bias) in one pass, and its gradients in another. x is [..., N], `bias` [N] (or None) that of the
    linear that made x, which did not add it.
    """
    return activation("bias_relu", "relu", x, bias)
