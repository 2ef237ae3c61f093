"""Kernel bias_gelu: y = gelu(x + bias), exact (erf) or by tanh. N columns."""

import math
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.activation import activation

SHAPES = [(1, 64), (63, 100), (9, 1025), (0, 32)]


def reference(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Compute gelu(x + bias) in plain torch operations (Hendrycks & Gimpel 2016, arXiv:1606.08415).

    `approximate` "tanh" is what `transformers` calls gelu_new (activations.py, NewGELUActivation); it differs from the exact
    form by up to 5e-4, so neither may replace the other.
    """
    h = x if bias is None else x + bias
    if approximate == "none":
        return 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))
    inner = math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))
    return 0.5 * h * (1.0 + torch.tanh(inner))


def inputs(M: int, N: int, approximate: str = "none", **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for x [M, N]; `like` has dtype and device."""
    x, bias = torch.randn(M, N, **like), torch.randn(N, **like)
    return {"x": x, "bias": bias, "approximate": approximate}


def _exact(module: Any, x: Tensor) -> Tensor:
    return bias_gelu(x)


def _tanh(module: Any, x: Tensor) -> Tensor:
    return bias_gelu(x, approximate="tanh")


@kernel(
    "bias_gelu", reference, inputs, SHAPES, cpu="F.gelu",
    serves={"GELUActivation": _exact, "NewGELUActivation": _tanh, "FastGELUActivation": _tanh,
            "GELUTanh": _tanh, "PytorchGELUTanh": _tanh}, passes=("act",),
)  # fmt: skip
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Compute gelu(x + bias) in one pass, and its gradients in another. x is [..., N], `bias` [N] that of the linear
    that made x, which did not add it. `approximate` is "none" (erf: BERT) or "tanh" (gelu_new: GPT-2, GPT-Neo, ALBERT).
    """
    return activation("bias_gelu", "gelu" if approximate == "none" else "gelu_tanh", x, bias)
