"""Kernel rms_norm: y = x / rms(x) * weight over the last axis, the norm of T5 and the Llama family. N columns."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.choose_kernel import runs_triton
from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.norm import MOST_COLUMNS, norm

SHAPES = [(1, 64), (7, 100), (130, 257), (0, 32), (3, 3)]


def reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute x / rms(x) * weight in plain torch operations (arXiv:1910.07467; modeling_t5.py: T5LayerNorm)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        y = y.to(weight.dtype)
    return weight * y


def inputs(M: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for x [M, N]; `like` has dtype and device."""
    return {"x": torch.randn(M, N, **like), "weight": torch.randn(N, **like) + 1.0}


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    x = hidden_states
    if module.weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(module.weight.dtype)
    return rms_norm(x, module.weight, module.variance_epsilon)


def _llama(module: Any, hidden_states: Tensor) -> Tensor:
    x, weight = hidden_states, module.weight
    if torch.promote_types(x.dtype, weight.dtype) == x.dtype:
        return rms_norm(x, weight, module.variance_epsilon)
    one = torch.ones_like(weight, dtype=x.dtype)  # round before multiplying by weight
    return weight * rms_norm(x, one, module.variance_epsilon)


T5 = ("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm")
FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Granite")
LLAMA = tuple(f"{family}RMSNorm" for family in FAMILIES)


def _cannot(module: Any) -> str:
    many = module.weight.shape[0] > MOST_COLUMNS
    return f"its rows are longer than {MOST_COLUMNS}" if many else ""


@kernel(
    "rms_norm", reference, inputs, SHAPES, cannot=_cannot,
    serves=dict.fromkeys(T5, _forward) | dict.fromkeys(LLAMA, _llama),
    cpu="LayerNorm's backward and a correction",
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute RMSNorm of x [..., N] over the last axis, in its dtype, with weight [N]; `eps` is added to mean(x * x)."""
    if x.is_cuda and not runs_triton("rms_norm", x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return norm(x, weight, None, eps, rms=True)[0]
