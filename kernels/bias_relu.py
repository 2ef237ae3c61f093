"""bias_relu: y = relu(x + bias). N columns."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.activation import activation

SHAPES = [(1, 64), (63, 100), (9, 1025), (0, 32)]


def reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition; OPT's feed-forward (transformers, modeling_opt.py: OPTDecoderLayer)."""
    h = x if bias is None else x + bias
    return torch.where(h > 0, h, torch.zeros_like(h))


def inputs(M: int, N: int, **like: Any) -> dict[str, Any]:
    """Random arguments of one test shape."""
    return {"x": torch.randn(M, N, **like), "bias": torch.randn(N, **like)}


def _forward(module: Any, x: Tensor) -> Tensor:
    return bias_relu(x)


@kernel("bias_relu", reference, inputs, SHAPES, serves={"ReLU": _forward}, cpu="F.relu")
def bias_relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = relu(x + bias), one pass each way; the gradient of the bias comes with that of x.

    Args:
        x: [..., N].
        bias: [N], of the linear before; it is then called without its own.
    """
    return activation("bias_relu", "relu", x, bias)
