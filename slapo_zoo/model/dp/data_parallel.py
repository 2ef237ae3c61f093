"""How a scheduled model runs and sums over dp: the seam where an engine takes over.

The default runs the model as it is; hooks average its gradients over dp (`gradient_reducer`). An engine
is a subclass: it may run the model through a wrapper, sum during the backward, and keep parameters,
gradients and optimizer divided over dp. What is saved is whole over dp, so engines read each other.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.language import gradients
from slapo_zoo.model.gradients.calls import Calls
from slapo_zoo.model.gradients.gradient_reducer import GradientReducer, is_taken
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.pipeline_runtime import pipeline_step


@dataclass
class Whole:
    """Parameters and optimizer as they are without dp: what checkpoints are made of and read into.

    Args:
        tensors: parameters and buffers of this tp and pp rank by name, each whole over dp, or rows that
            are marked as such.
        optimizer: of torch, over these parameters, or None.
    """

    tensors: dict[str, Tensor]
    optimizer: Any = None

    def put_back(self) -> None:
        """Give what was read to the engine; here nothing was taken out of it."""


class DataParallel:
    """The model runs as it is; hooks average gradients over dp while the last backward goes on."""

    loss_scale: float = 1.0  # what averages over dp gets losses that are dp times larger
    clips_itself: bool = False  # an engine that steps within train_step has clipped by then
    reducer: GradientReducer

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        """Run the model's own forward and return its output."""
        return model._slapo.own_forward(model, **batch)

    @contextmanager
    def new_gradients(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Return the context in which the gradients of one step are made and summed."""
        at_once = any(is_taken(p) for p in parameters)
        with self.reducer.one_step(at_once), gradients.only_new(parameters):
            yield

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch's forward and backward."""
        return nullcontext() if is_last else self.reducer.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Run the backward of one micro-batch."""
        (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()

    def pipeline_step(
        self, pipeline: Any, run: Callable[..., Any], tensors: dict[str, Tensor],
        others: dict[str, Any], count: int,
    ) -> Tensor:  # fmt: skip
        """All micro-batches through the stages; this rank's share of the loss."""
        before_last = self.reducer.last_backward if _ends_once(pipeline) else None
        with self.reducer.no_sync():
            loss = pipeline_step(
                pipeline, scaled(run, self.loss_scale), tensors, others, count, before_last
            )
        return loss / self.loss_scale

    def sum_over_dp(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        """Sum all gradients over dp, where the backward has not done it."""
        self.reducer.average()

    def own_backward_ended(self, parameters: list[nn.Parameter], mesh: Mesh, paused: bool) -> None:
        """The backward of a loop of one's own has come to its end; hooks have averaged over dp."""

    def clip_grad_norm_(self, model: Any, max_norm: float) -> Tensor:
        """Scale all gradients so that the global 2-norm is at most `max_norm`; returns the norm."""
        named = list(model.named_parameters())
        norm = gradients.global_norm(named, model._slapo.plan)
        gradients.scale([p for _, p in named], max_norm, norm)
        return norm

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        """Return this rank's parameters (or their gradients) and buffers, unsharded over dp.

        A collective call over dp; a missing gradient is 0.
        """
        found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        if grads:
            return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}
        return found | dict(model.named_buffers(remove_duplicate=False))

    def kept(self, model: Any) -> dict[str, Tensor]:
        """Return the tensors to save: where a rank can write its rows alone, these rows."""
        return self.tensors(model)

    def whole_of(self, value: Any, p: Any, shape: tuple[int, ...]) -> Any:
        """A value of the size of a parameter or of its rows, whole over dp; a collective call where it is rows.

        Args:
            value: the parameter, its gradient, or a state of its optimizer.
            p: the parameter.
            shape: of the parameter, whole over dp.
        """
        return value

    def gives(self, mesh: Mesh) -> bool:
        """Return whether a whole tensor that goes to other ranks may come from this one."""
        return True

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        """Return model and optimizer for a checkpoint, whole over dp; a collective call over dp."""
        return Whole({**dict(model.named_parameters()), **dict(model.named_buffers())}, optimizer)


@contextmanager
def within_engine(model: Any) -> Iterator[None]:
    """Context in which a call of the model is a call of its own forward: the engine's wrapper calls it."""
    runtime = model._slapo
    runtime.within_engine = True
    try:
        yield
    finally:
        runtime.within_engine = False


def use_engine(model: Any, engine: DataParallel, divides: bool = False) -> None:
    """Let an engine run a model and sum its gradients over dp.

    Args:
        model: of AutoScheduledModel.
        engine: what takes the place of the default.
        divides: its parameters are its own, and take no hooks.
    """
    runtime = model._slapo
    calls = runtime.calls
    calls.divided_parameters, calls.guard.needed = divides, not engine.clips_itself
    calls.reducer.over_dp = False
    runtime.data_parallel, engine.reducer = engine, calls.reducer


def use_hooks(runtime: Any) -> None:
    """Let hooks complete the gradients of a model: the default."""
    engine, runtime.calls = DataParallel(), Calls(runtime, runtime.schedule.mesh)
    engine.loss_scale = float(runtime.schedule.mesh.size("loss"))
    runtime.data_parallel, engine.reducer = engine, runtime.calls.reducer


def sum_partial_gradients_in_backward(model: Any) -> None:
    """Hook the parameters of a model for an engine that runs the backward alone.

    The backwards of tp peers run alike.
    """
    model._slapo.calls.reducer.over_dp = False
    model._slapo.calls.prepare(model)


def scaled(run: Callable[..., Any], scale: float) -> Callable[..., Any]:
    """The loss of a micro-batch times `scale`: what averages over dp is asked for a sum."""
    return run if scale == 1.0 else lambda *args: run(*args) * scale


def _ends_once(pipeline: Any) -> bool:
    """Return whether a rank's last backward of a micro-batch is that of its only stage."""
    places = pipeline.places
    return places.num_stages == places.pp and places.custom is None
