"""Kernel bias_dropout_residual_layer_norm: y = LayerNorm(dropout(x + x_bias) + residual).

It follows a linear in a transformer block. B batch rows, N columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch.choose_kernel import runs_triton
from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.dropout import dropout
from slapo_zoo.kernels.dropout_mask import dropout_of, mask_like
from slapo_zoo.kernels.layer_norm import reference as layer_norm_reference
from slapo_zoo.kernels.norm import MOST_COLUMNS, norm, summed

SHAPES = [(1, 3, 64), (3, 5, 100), (2, 33, 257), (0, 2, 32)]


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute (y, z) in torch operations, as BertOutput does: z = mask * (x + x_bias) + residual, y = LayerNorm(z).
    `seeds` [B] give the dropout mask of each batch row.
    """
    x = x if x_bias is None else x + x_bias
    mask = mask_like(x, None, seeds, p)
    z = (x if mask is None else x * mask) + residual
    return layer_norm_reference(z, weight, bias, eps), z


def inputs(B: int, S: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for x [B, S, N], with dropout; `like` has dtype and device."""
    x, residual = torch.randn(B, S, N, **like), torch.randn(B, S, N, **like)
    weight, bias, x_bias = (torch.randn(N, **like) for _ in range(3))
    seeds = torch.randint(2**63 - 1, (B,), device=like.get("device"))
    return {"x": x, "residual": residual, "weight": weight + 1.0, "bias": bias, "x_bias": x_bias,
            "seeds": seeds, "p": 0.25}  # fmt: skip


def _forward(module: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Run BertSelfOutput or BertOutput with this kernel, which adds no bias: the child `dense` has added its own."""
    x, norm_ = module.dense(hidden_states), module.LayerNorm
    drop = dropout_of(module.dropout, x)
    args = (x, input_tensor, norm_.weight, norm_.bias)
    return bias_dropout_residual_layer_norm(*args, eps=norm_.eps, **drop)[0]


@kernel(
    "bias_dropout_residual_layer_norm", reference, inputs, SHAPES, cpu="addcmul, LayerNorm",
    serves=dict.fromkeys(("BertSelfOutput", "BertOutput", "RobertaSelfOutput", "RobertaOutput"), _forward),
    passes=("LayerNorm", "dropout"),
)  # fmt: skip
def bias_dropout_residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute (y, z) with z = mask * (x + x_bias) + residual and y = LayerNorm(z). A post-norm block (BERT) uses y
    alone; in a pre-norm block (GPT-2) z is the next residual. x and `residual` are [B, ..., N], `weight` and `bias` of
    the norm [N], `x_bias` [N] is the bias of the linear that made x, if that linear did not add it; `eps` is added to
    the variance. The dropout mask is `keep` [B, ..., N], of 0 and 1/(1-p), or if that is None hashed with probability
    `p` from `seeds`, int64 [B].
    """
    name = "bias_dropout_residual_layer_norm"
    if (x.is_cuda and not runs_triton(name, x)) or x.shape[-1] > MOST_COLUMNS:
        if keep is None and seeds is not None:
            x, x_bias = dropout(x if x_bias is None else x + x_bias, None, seeds, p), None
        z = summed(x, x_bias, residual, keep)
        return functional.layer_norm(z, z.shape[-1:], weight, bias, eps), z
    args = (x_bias, residual, keep, seeds, p)
    return norm(x, weight, bias, eps, False, *args)
