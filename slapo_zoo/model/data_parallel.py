"""How a scheduled model runs and sums over dp: the seam where an engine takes over.

The default runs the model as it is and sums gradients over dp after the last micro-batch. An engine
is a subclass: it may run the model through a wrapper, sum during the backward, and keep parameters,
gradients and optimizer divided over dp. What is saved is whole over dp, so engines read each other.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.language import gradients
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.runtime import pipeline_step


@dataclass
class Whole:
    """Parameters and optimizer as they are without dp: what checkpoints are made of and read into.

    Args:
        tensors: parameters and buffers of this tp and pp rank by name, each whole over dp.
        optimizer: of torch, over these parameters, or None.
    """

    tensors: dict[str, Tensor]
    optimizer: Any = None

    def put_back(self) -> None:
        """Give what was read to the engine; here nothing was taken out of it."""


class DataParallel:
    """Sums over dp after the last micro-batch, in a few large collectives."""

    loss_scale: float = 1.0  # an engine that averages over dp gets losses that are dp times larger

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        """The output of the model's own forward."""
        return model._slapo.own_forward(model, **batch)

    def new_gradients(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        """Where the gradients of one step are made and summed."""
        return gradients.only_new(parameters)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch."""
        yield

    def backward(self, loss: Tensor) -> None:
        """The backward of one micro-batch."""
        (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()

    def pipeline_step(
        self, pipeline: Any, run: Callable[..., Any], tensors: dict[str, Tensor],
        others: dict[str, Any], count: int,
    ) -> Tensor:  # fmt: skip
        """All micro-batches through the stages; this rank's share of the loss."""
        return pipeline_step(pipeline, run, tensors, others, count)

    def sum_over_tp(self, named: dict[str, nn.Parameter], names: Iterable[str], group: Any) -> None:
        """Sum the gradients that are partial over a group beside dp."""
        parameters = [named[name] for name in names if name in named]
        gradients.all_reduce_gradients(parameters, group if parameters else None)

    def sum_over_dp(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        """Sum all gradients over dp, where the backward has not done it."""
        gradients.all_reduce_gradients(parameters, mesh.group("dp"))

    def clip_grad_norm_(self, model: Any, max_norm: float) -> Tensor:
        """Scale all gradients so that the global 2-norm is at most `max_norm`; returns the norm."""
        state, named = model._slapo.schedule.state, list(model.named_parameters())
        norm = gradients.global_norm(named, state, model.mesh, model._slapo.owned)
        gradients.scale([p for _, p in named], max_norm, norm)
        return norm

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        """Parameters (or their gradients) and buffers of this rank, whole over dp.

        A collective call over dp; a missing gradient is 0.
        """
        found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        if grads:
            return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}
        return found | dict(model.named_buffers(remove_duplicate=False))

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        """What a checkpoint is made of; a collective call over dp."""
        return Whole({**dict(model.named_parameters()), **dict(model.named_buffers())}, optimizer)


@contextmanager
def within_engine(model: Any) -> Iterator[None]:
    """Within it, a call of the model is a call of its own forward: the engine's wrapper calls it."""
    runtime = model._slapo
    runtime.within_engine = True
    try:
        yield
    finally:
        runtime.within_engine = False


def sum_partial_gradients_in_backward(model: Any) -> None:
    """Hooks that sum gradients which are partial over tp, for engines that run the backward alone.

    rewrite:  p.grad += partial gradient  -->  p.grad += sum over the group

    They are those of directives that mark a gradient as partial, of norms under sequence
    parallelism, and of KV heads that neighbouring ranks share. The backwards of tp peers run alike.
    """
    runtime, group = model._slapo, model.mesh.group("tp")
    state, named = runtime.schedule.state, dict(model.named_parameters())
    for name, own in runtime.replicas:
        named[name].register_hook(_Sum(own))
    for name in sorted(state.partial_gradients & named.keys()):
        named[name].register_hook(_Sum(group))
    for name in sorted((state.sequence_gradients - state.partial_gradients) & named.keys()):
        named[name].register_hook(_Sum(group, lambda: state.tokens_divided))


class _Sum:
    def __init__(self, group: Any, condition: Callable[[], bool] = lambda: True):
        self.group, self.condition = group, condition

    def __call__(self, grad: Tensor) -> Tensor | None:
        if self.group is None or not self.condition():
            return None
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total
