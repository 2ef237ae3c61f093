"""Kernel layer_norm: y = (x - mean) / std * weight + bias over the last axis. N columns."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch.choose_kernel import runs_triton
from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.norm import MOST_COLUMNS, norm

SHAPES = [(1, 64), (7, 100), (130, 257), (0, 32), (3, 3)]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Compute LayerNorm of x [M, N] in torch operations (Ba et al. 2016, arXiv:1607.06450), with statistics in fp32 or fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (y if bias is None else y + bias).to(x.dtype)


def inputs(M: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for x [M, N]; `like` has dtype and device."""
    x, weight, bias = (torch.randn(*shape, **like) for shape in ((M, N), (N,), (N,)))
    return {"x": x, "weight": weight + 1.0, "bias": bias}


def _forward(module: Any, input: Tensor) -> Tensor:
    return layer_norm(input, module.weight, module.bias, module.eps)


def _cannot(module: Any) -> str:
    if len(module.normalized_shape) != 1:
        return f"it normalises {len(module.normalized_shape)} axes, not one"
    if module.weight is None:
        return "it has no weight"
    many = module.normalized_shape[0] > MOST_COLUMNS
    return f"its rows are longer than {MOST_COLUMNS}" if many else ""


@kernel(
    "layer_norm", reference, inputs, SHAPES, serves={"LayerNorm": _forward}, cannot=_cannot,
    cpu="F.layer_norm",
)  # fmt: skip
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Compute LayerNorm over the last axis of x [..., N] with weight and bias [N] in one GPU launch; the backward is
    one launch, then sums of dw and db over rows. `eps` is added to the variance.
    """
    if not runs_triton("layer_norm", x) or x.shape[-1] > MOST_COLUMNS:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return norm(x, weight, bias, eps)[0]
