"""Overlap of the all-reduce of input gradients with the computation of weight gradients.

A column-parallel layer needs two products in backward, dx = dy w and dw = dy' x, and dx is all-reduced.
Megatron-LM starts the all-reduce between the two (`async_tensor_model_parallel_allreduce`). If several layers
share x (q, k and v; gate and up), their dx are added first, so all of their dw are postponed until the all-reduce has
begun. `wait`, `later` and `start` are autograd nodes that pass x and w on unchanged in the forward:

    forward:   x -> wait -> [w -> later, for each column-parallel w below] -> start -> the module
    backward:  every dx; start: the all-reduce begins; later: every dw; wait: the all-reduce is complete

Autograd makes this order: of the nodes that are ready, it runs the one that was created last. Another order would
lose the overlap, but give the same result.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.parallel.begun import collective, explained
from slapo_zoo.parallel.collectives import Group, viewed, with_gradient
from slapo_zoo.parallel.once import once


class _Sum:
    """Handle of one all-reduce of an input gradient, which runs while weight gradients are computed."""

    def __init__(self, group: Group):
        self.group, self.work = group, None

    def start(self, grad: Tensor) -> Tensor:
        """Start the all-reduce of a copy of `grad`, and return the copy."""
        total = grad.contiguous().clone()
        self.work = collective(dist.all_reduce, total, group=self.group, async_op=True)
        return total

    def wait(self, grad: Tensor) -> Tensor:
        """Wait for the all-reduce of `grad` (the result of `start`), if one was started; return `grad`, now the sum."""
        if self.work is not None:
            explained(self.work.wait)
            self.work = None
        return grad


class _Product(torch.autograd.Function):
    """Autograd function of a linear layer, x, w, b --> y, whose backward leaves the weight gradient to a later node; w is
    [out, in] (Linear) or [in, out] (Conv1D).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, in_first, put_off, multiply):
        ctx.save_for_backward(x, weight)
        ctx.in_first, ctx.put_off, ctx.multiply = in_first, put_off, multiply
        if not in_first and multiply is torch.mm:
            return nn.functional.linear(x, weight, bias)
        rows, b = x.flatten(0, -2), weight if in_first else weight.t()
        y = torch.addmm(bias, rows, b) if multiply is torch.mm else multiply(rows, b, bias)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    @once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy_2d = dy.reshape(-1, dy.shape[-1])
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.multiply(dy_2d, weight.t() if ctx.in_first else weight).view(x.shape)
        if ctx.needs_input_grad[2]:
            db = dy_2d.sum(0)
        factors = (x.reshape(-1, x.shape[-1]), dy_2d, ctx.in_first, ctx.multiply)
        if ctx.put_off is None:
            return dx, _weight_gradient(*factors), db, None, None, None
        ctx.put_off[:] = [factors]  # replaced, not appended: a pipeline may run this node twice
        return dx, weight.new_zeros(()).expand_as(weight), db, None, None, None


def _weight_gradient(x: Tensor, dy: Tensor, in_first: bool, multiply: Any) -> Tensor:
    return multiply(x.t(), dy) if in_first else multiply(dy.t(), x)


class ColumnForward:
    """Forward of a column-parallel Linear or Conv1D whose weight gradient can be postponed.

    Args:
        module: the layer.
        in_first: True if the layer's weight is [in, out], as in a Conv1D.
        multiply: function that multiplies two matrices, e.g. `torch.mm`.
    """

    def __init__(self, module: nn.Module, in_first: bool, multiply: Any = torch.mm):
        self.module, self.in_first, self.multiply = module, in_first, multiply
        self.prepared: tuple[Tensor, Tensor, list] | None = None

    def prepare(self) -> None:
        """Create the autograd node that computes the postponed weight gradient. It must exist
        before the node of the all-reduce: of two ready nodes, autograd runs the newer one first.
        """
        weight: Any = self.module._parameters["weight"]
        if weight is not None and weight.requires_grad:
            put_off: list = []
            later = with_gradient(weight, viewed, lambda _: _weight_gradient(*put_off.pop()))
            self.prepared = weight, later, put_off

    def __call__(self, x: Tensor) -> Tensor:
        module: Any = self.module
        prepared, self.prepared = self.prepared, None
        if not possible(x) or x.dtype != module.weight.dtype or not module.weight.requires_grad:
            return type(module).forward(module, x)
        source, weight, put_off = prepared or (None, None, None)
        if source is not module.weight:  # called without `enter`, as in a recomputation
            weight, put_off = module.weight, None
        return _Product.apply(x, weight, module.bias, self.in_first, put_off, self.multiply)


def possible(x: Tensor) -> bool:
    """Return whether a weight gradient can be postponed: gradients are on, without autocast or
    compilation. `x` is the input of the layer.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.is_autocast_enabled(x.device.type)


def enter(x: Tensor, group: Group, columns: Iterable[ColumnForward]) -> Tensor:
    """Return x unchanged; its gradient is all-reduced while the weight gradients of `columns` are computed.

    Args:
        x: input that the column-parallel layers share.
        group: process group of the tp ranks; not None.
        columns: forwards of the layers; each runs before the next `enter` with the same layers.
    """
    under_way = _Sum(group)
    x = with_gradient(x, viewed, under_way.wait)
    for column in columns:
        column.prepare()
    return with_gradient(x, viewed, under_way.start)
