"""Kernel dropout: y = mask * x, with a given or hashed mask. It moves 4 bytes per element in bf16 and saves no mask.

B batch rows, N elements in each.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.choose_kernel import in_triton
from slapo_zoo.dispatch.kernel_registry import kernel, operator
from slapo_zoo.kernels.dropout_mask import mask_like

SHAPES = [(1, 3, 64), (3, 5, 100), (2, 33, 257), (0, 2, 32)]


def reference(x: Tensor, seeds: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Compute dropout of x [B, ...] in torch operations (Srivastava et al. 2014), scaled by 1 / (1 - p) as torch does.
    The mask of batch row b is hashed from seeds[b]; without seeds, or for p = 0, x is returned.
    """
    mask = mask_like(x, None, seeds, p)
    return x if mask is None else x * mask


def inputs(B: int, S: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of the kernel for x [B, S, N]; `like` has dtype and device."""
    seeds = torch.randint(2**63 - 1, (B,), device=like.get("device"))
    return {"x": torch.randn(B, S, N, **like), "seeds": seeds, "p": 0.25}


@kernel("dropout", reference, inputs, SHAPES, cpu="mul")
def dropout(
    x: Tensor, keep: Tensor | None = None, seeds: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """Compute mask * x for x [B, ...]; the backward applies the same mask to the gradient. The mask is `keep` [B, ...],
    of 0 and 1/(1-p), or if that is None hashed with probability `p` from `seeds`, int64 [B].
    """
    if keep is not None:
        return x * keep
    return x if seeds is None or p == 0.0 else _dropped(x, seeds, p)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, seeds, ctx.p = inputs
    ctx.save_for_backward(seeds)


def _gradients(ctx: Any, dy: Tensor) -> tuple:
    return _dropped(dy, *ctx.saved_tensors, ctx.p), None, None


@operator("dropout", lambda x, seeds, p: x.new_empty(x.shape), _setup, _gradients)
def _dropped(x: Tensor, seeds: Tensor, p: float) -> Tensor:
    if in_triton(x):
        from slapo_zoo.kernels import dropout_triton

        return dropout_triton.dropped(x, seeds, p)
    return reference(x, seeds, p).contiguous()
