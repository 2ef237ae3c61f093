"""Column- and row-parallel Linear, Conv1D, Conv1d to Conv3d and Embedding: outputs and biases of layers sharded over n tp ranks.

column: w_r [O/n, I], y_r [B, O/n] = x w_r^T + b_r         each rank has other columns of the output
row:    w_r [O, I/n], y [B, O] = sum over r (x_r w_r^T) + b    partial sums; the bias is added once, after the sum

Tables of sharding rules (schedules/*.py) choose `column` or `row` (slapo_zoo.zoo.rules) per layer; `shard` slices the
weight, and `sync` inserts the collectives. Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.language.directive import Site


def _linear(module: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight)


def _conv1d(module: Any, x: Tensor) -> Tensor:
    return torch.matmul(x, module.weight)  # transformers' Conv1D stores [in, out]


def _convolution(module: Any, x: Tensor) -> Tensor:
    return module._conv_forward(x, module.weight, None)


# class name -> (forward without bias, number of axes after the output's channel axis)
WITHOUT_BIAS = {
    "Linear": (_linear, 0), "Conv1D": (_conv1d, 0),
    "Conv1d": (_convolution, 1), "Conv2d": (_convolution, 2), "Conv3d": (_convolution, 3),
}  # fmt: skip
# class name -> (input axis, output axis) of the weight
WEIGHT_AXES = {
    "Linear": (1, 0),
    "Conv1D": (0, 1),
    "Embedding": (0, 1),
    "Conv2d": (1, 0),
    "Conv1d": (1, 0),
    "Conv3d": (1, 0),
}


def output_of(site: Site) -> str:
    """Return how the output of the module of `site` is sharded over tp: "partial" (partial sums), "divided" (shards of
    the columns), "whole" (unsharded), or "" for a class that is no linear, convolution or embedding.
    """
    names = [c.__name__ for c in type(site.module).__mro__ if c.__name__ in WEIGHT_AXES]
    placed = site.placed("weight")
    if not names:
        return ""
    if placed is None:
        return "whole"
    return "partial" if placed.placement.axis == WEIGHT_AXES[names[0]][0] else "divided"


def sum_before_bias(module: Any, collective: Callable[[Tensor], Tensor]) -> bool:
    """Replace the forward of a row-parallel module by `collective(product) + bias`; return True if that was done.

    Args:
        module: Linear, Conv1D or convolution with a bias, weight sharded along its inputs; other classes stay as is.
        collective: all-reduces or reduce-scatters the partial products of the ranks.
    """
    names = [c.__name__ for c in type(module).__mro__ if c.__name__ in WITHOUT_BIAS]
    if not names:
        return False
    product, behind = WITHOUT_BIAS[names[0]]
    shape = (-1, *(1,) * behind)

    def forward(x: Tensor) -> Tensor:
        y = collective(product(module, x))
        bias = module.bias  # under autocast y has fewer bits
        return y if bias is None else y + bias.view(shape).to(y.dtype)

    module.forward = forward
    return True
