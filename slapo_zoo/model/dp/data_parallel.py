"""Data parallelism of a scheduled model: the interface that engines override.

By default the model runs as it is, and hooks average its gradients over dp (`gradient_reducer`). An engine
is a subclass: it may run the model through a wrapper, reduce during the backward, and shard parameters,
gradients and optimizer over dp. What is saved is gathered over dp, so that engines read each other's files.
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
    """Parameters and optimizer state gathered over dp: what a checkpoint is written from, and read into.

    Args:
        tensors: name --> parameter or buffer of this tp and pp rank, gathered over dp; or under ZeRO a tensor of
            this dp rank's rows (a slice of axis 0), which has the range of rows as an attribute.
        optimizer: torch optimizer over these parameters, or None.
    """

    tensors: dict[str, Tensor]
    optimizer: Any = None

    def put_back(self) -> None:
        """Copy the gathered tensors, into which a checkpoint was read, back into the engine. Default: do nothing."""


class DataParallel:
    """Default data parallelism: hooks average gradients over dp in the backward of a step's last micro-batch."""

    loss_scale: float = 1.0  # factor of the loss: dp where an average over dp follows
    clips_itself: bool = False  # True: the engine clips, steps and clears gradients
    reducer: GradientReducer

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        """Run the model's own forward with the keyword arguments `batch`, and return its output."""
        return model._slapo.own_forward(model, **batch)

    @contextmanager
    def new_gradients(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Context of one training step, in which `.grad` of this rank's `parameters` is empty at first. When the step
        has ended, with gradients reduced, the earlier gradients are added; an error restores them.
        """
        at_once = any(is_taken(p) for p in parameters)
        with self.reducer.one_step(at_once), gradients.only_new(parameters):
            yield

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch's forward and backward; only the last one reduces over dp."""
        return nullcontext() if is_last else self.reducer.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a micro-batch's loss times `loss_scale`, which undoes the average over dp."""
        (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()

    def pipeline_step(
        self, pipeline: Any, run: Callable[..., Any], tensors: dict[str, Tensor],
        others: dict[str, Any], count: int,
    ) -> Tensor:  # fmt: skip
        """Run all micro-batches through the pipeline; return this rank's share of the loss.

        `run`: (batch, row indices) --> loss; `tensors`: entries split by rows into `count` parts; `others`: the rest.
        """
        scale = self.loss_scale
        scaled = run if scale == 1.0 else lambda *args: run(*args) * scale
        return self.run_stages(pipeline, scaled, tensors, others, count) / scale

    def run_stages(self, pipeline: Any, *step: Any) -> Tensor:
        """Run all micro-batches through the pipeline, and reduce gradients over dp in the last backward.

        `step` are the arguments of `pipeline_step`, with the loss already scaled; return the scaled loss.
        """
        before_last = self.reducer.last_backward if _ends_once(pipeline) else None
        with self.reducer.no_sync():
            return pipeline_step(pipeline, *step, before_last)

    def sum_over_dp(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        """Sum this rank's gradients over dp, unless hooks did so in the backwards of the step.

        The collective averages; each rank multiplied its loss by the number of ranks (`loss_scale`) to get a sum.
        """
        self.reducer.average()

    def own_backward_ended(self, parameters: list[nn.Parameter], mesh: Mesh, paused: bool) -> None:
        """Complete a backward in the user's own loop; do nothing by default, because hooks have averaged over dp.

        Args:
            parameters: trained parameters of this rank.
            mesh: mesh of the model.
            paused: True within `model.no_sync()`, where nothing is averaged.
        """

    def clip_grad_norm_(self, model: Any, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before."""
        named = list(model.named_parameters())
        norm = gradients.global_norm(named, model._slapo.plan)
        gradients.scale([p for _, p in named], max_norm, norm)
        return norm

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        """Return {name: tensor gathered over dp} of this rank's parameters and buffers or, with `grads`, its gradients.

        A collective call over dp under ZeRO; a missing gradient is 0.
        """
        found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        if grads:
            return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}
        return found | dict(model.named_buffers(remove_duplicate=False))

    def kept(self, model: Any) -> dict[str, Tensor]:
        """Return {name: tensor} that this rank writes to a checkpoint; under ZeRO, this dp rank's slice of axis 0."""
        return self.tensors(model)

    def whole_of(self, value: Any, p: Any, shape: tuple[int, ...]) -> Any:
        """Return a parameter, its gradient or optimizer state gathered over dp; a collective call under ZeRO.

        Args:
            value: the tensor to gather; a value of another size, or that is no tensor, is returned unchanged.
            p: the parameter that `value` belongs to.
            shape: unsharded shape of the parameter.
        """
        return value

    def sends(self, mesh: Mesh) -> bool:
        """Return whether `stream_weights` may send tensors from this rank; under ZeRO, from the first `dp_shard` group."""
        return True

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        """Return parameters and optimizer gathered over dp for a checkpoint; a collective call over dp."""
        return Whole({**dict(model.named_parameters()), **dict(model.named_buffers())}, optimizer)


@contextmanager
def within_engine(model: Any) -> Iterator[None]:
    """Context in which a call of the model runs the model's forward; outside it a call goes to the engine, e.g. DDP."""
    runtime = model._slapo
    runtime.within_engine = True
    try:
        yield
    finally:
        runtime.within_engine = False


class Native(DataParallel):
    """Engine whose own object runs the model, and reduces over dp in the backward of the last micro-batch.

    Args:
        native: the engine's own object around the model, e.g. a DDP module.
        loss_scale: factor of the loss that turns the engine's average over dp into a sum: the number of ranks,
            or 1 where the engine sums.
    """

    def __init__(self, native: Any, loss_scale: float = 1.0):
        self.native, self.loss_scale = native, loss_scale

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        """Call the engine's object around the model with the keyword arguments `batch`; return the output."""
        with within_engine(model):
            return self.native(**batch)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; only that of the last one reduces gradients over dp."""
        return nullcontext() if is_last else self.native.no_sync()


def use_engine(model: Any, engine: DataParallel, divides: bool = False) -> None:
    """Let an engine, such as DDP or DeepSpeed, run a model and reduce its gradients over dp.

    Args:
        model: a scheduled model.
        engine: replacement of the default `DataParallel`.
        divides: True if the engine replaces parameters by sharded tensors of its own (FSDP2), so that gradient
            hooks on the original parameters never run.
    """
    runtime = model._slapo
    calls = runtime.calls
    calls.divided_parameters, calls.guard.needed = divides, not engine.clips_itself
    calls.reducer.over_dp = False
    runtime.data_parallel, engine.reducer = engine, calls.reducer


def use_hooks(runtime: Any) -> None:
    """Set the default `DataParallel`, whose hooks reduce gradients, in a model's runtime state."""
    engine, runtime.calls = DataParallel(), Calls(runtime, runtime.schedule.mesh)
    engine.loss_scale = float(runtime.schedule.mesh.size("loss"))
    runtime.data_parallel, engine.reducer = engine, runtime.calls.reducer


def sum_partial_gradients_in_backward(model: Any) -> None:
    """Hook parameters to reduce gradients over tp only, for an engine that reduces over dp in its own backward."""
    model._slapo.calls.reducer.over_dp = False
    model._slapo.calls.prepare(model)


def _ends_once(pipeline: Any) -> bool:
    """Return whether this rank runs a single stage, so that the step's last backward completes all gradients."""
    return pipeline.places.num_stages == pipeline.places.pp
