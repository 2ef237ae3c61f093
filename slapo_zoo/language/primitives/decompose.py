"""decompose: split a linear layer into a matrix product and a separate addition of the bias."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.language.directive import Directive, Site, primitive


class DecomposedLinear(nn.Linear):
    """nn.Linear whose product and bias are separate operations, and so separate nodes of a traced graph."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `input` [..., I] by the weight, then add the bias; return the sum [..., O]."""
        y = nn.functional.linear(input, self.weight)
        return y if self.bias is None else y + self.bias


@cache
def _decomposed_conv1d() -> type:
    """Return a subclass of transformers' Conv1D (weight [I, O]) in which product and bias are separate operations."""
    from transformers.pytorch_utils import Conv1D

    class DecomposedConv1D(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, self.weight) + self.bias

    return DecomposedConv1D


@primitive("decompose")
@dataclass(frozen=True)
class Decompose(Directive):
    """Separate the bias addition of a Linear or Conv1D from its product.

    rewrite:  y = linear(x, w, b)  -->  y = linear(x, w) + b
    note:     the module, its parameters and its hooks stay; without a bias only the class changes
    errors:   another class; a module that was sharded before
    """

    def check(self, site: Site) -> None:
        if type(site.module) is not nn.Linear and type(site.module).__name__ != "Conv1D":
            problem = f"found {type(site.module).__name__}, expected Linear or Conv1D"
            raise self.fail(site, problem, "select only the linear layers")
        if "forward" in site.module.__dict__:
            hint = "call decompose() before the directive that changed the forward"
            raise self.fail(site, "an earlier directive changed the forward", hint)
        if site.placed("weight") is not None:
            problem = f"the weight is sharded already, by {site.state.placed[site.name('weight')].directive}"
            raise self.fail(site, problem, "call decompose() before shard()")

    def apply(self, site: Site) -> None:
        is_linear = type(site.module) is nn.Linear
        new: Any = DecomposedLinear if is_linear else _decomposed_conv1d()
        site.module.__class__ = new
