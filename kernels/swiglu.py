"""swiglu: y = silu(gate) * up, the gated feed-forward of the Llama family. N columns."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.kernel import kernel
from slapo_zoo.kernels.activation import activation

SHAPES = [(7, 64), (15, 100), (32, 257), (0, 32)]
SILU = ("SiLU", "SiLUActivation")
SERVED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GraniteMLP", "Olmo2MLP")


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The definition (Shazeer 2020, arXiv:2002.05202; modeling_llama.py: LlamaMLP)."""
    return gate * torch.sigmoid(gate) * up


def inputs(M: int, N: int, **like: Any) -> dict[str, Any]:
    """Random arguments of one test shape."""
    return {"gate": torch.randn(M, N, **like), "up": torch.randn(M, N, **like)}


def _forward(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))


def _cannot(module: Any) -> str:
    act = type(module.act_fn).__name__
    return "" if act in SILU else f"its activation is {act}, not silu"


@kernel(
    "swiglu", reference, inputs, SHAPES, cpu="F.silu, recomputed", cannot=_cannot,
    serves=dict.fromkeys(SERVED, _forward),
)  # fmt: skip
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """y = silu(gate) * up, one pass each way; of the two factors only gate and up are kept.

    Args:
        gate: [..., N].
        up: the shape of gate.
    """
    return activation("swiglu", "silu", gate, up=up)
