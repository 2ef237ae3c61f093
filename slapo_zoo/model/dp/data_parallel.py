"""Data parallelism of a scheduled model: the default by gradient hooks, and the interface that engines override.

By default hooks average the model's gradients over dp (`gradient_reducer`). An engine (DDP, FSDP2, DeepSpeed) is a
subclass of `DataParallel`, which may run the model through a wrapper, reduce gradients during the backward, and shard
parameters, gradients and optimizer over dp. Files hold tensors unsharded over dp, so each engine loads any other's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.language import gradients
from slapo_zoo.model.gradients.calls import Calls
from slapo_zoo.model.gradients.gradient_reducer import is_taken
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.replaced import replaced
from slapo_zoo.pipeline.pipeline_runtime import pipeline_step


@dataclass
class Whole:
    """Tensors and optimizer of one rank from which a checkpoint is written, or into which one is read.

    Args:
        tensors: name --> parameter or buffer of this tp and pp rank. FSDP2 and DeepSpeed give copies gathered over dp.
            ZeRO of slapo_zoo (`dp_shard=`) gathers nothing: it gives the rows (slice of axis 0) of this dp rank.
        optimizer: torch optimizer over the parameters in `tensors`, or None.
    """

    tensors: dict[str, Tensor]
    optimizer: Any = None

    def put_back(self) -> None:
        """Copy `tensors`, after a checkpoint was read into them, to the engine's own shards; by default do nothing."""


class DataParallel:
    """Base class of data parallelism: hooks average gradients over dp in the backward of the last micro-batch."""

    loss_scale: float = 1.0  # factor of the loss: dp where an average over dp follows
    clips_itself: bool = False  # True: the engine clips, steps and clears gradients
    calls: Calls

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        """Run the model's own forward, with the user's hooks on the model, on arguments `batch`; return its output."""
        with within_engine(model):
            return model._call_impl(**batch)

    @contextmanager
    def new_gradients(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Context of one training step, which begins with `.grad` of this rank's `parameters` set to None. At the end
        the gradients from before the step are added to the new ones; an error restores the gradients from before.
        """
        reducer = self.calls.reducer
        reducer.in_step, reducer.averaged, reducer.at_once = True, False, any(map(is_taken, parameters))  # fmt: skip
        try:
            with gradients.only_new(parameters):
                yield
        except BaseException:
            self.calls.abandon()
            raise
        finally:
            reducer.in_step, reducer.at_once = False, True

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; only the last one averages gradients over dp."""
        return nullcontext() if is_last else self.calls.reducer.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Run the backward of `loss` * `loss_scale`, which is dp if an average of gradients over dp follows, else 1."""
        (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()

    def pipeline_step(
        self, pipeline: Any, run: Callable[..., Any], tensors: dict[str, Tensor],
        others: dict[str, Any], count: int,
    ) -> Tensor:  # fmt: skip
        """Run forward and backward of all micro-batches through the pipeline; return this dp rank's share of the loss.

        The share is the sum over micro-batches on ranks of the last stage, and 0 on others.

        Args:
            pipeline: the pipeline of this rank's stages.
            run: (micro-batch, global indices of its rows [B]) --> its share of the mean loss of all dp ranks' rows.
            tensors: entries of this dp rank's batch, which this call splits by rows into micro-batches.
            others: entries of the batch that every micro-batch gets as they are.
            count: number of micro-batches.
        """
        scale = self.loss_scale
        scaled = run if scale == 1.0 else lambda *args: run(*args) * scale
        return self.run_stages(pipeline, scaled, tensors, others, count) / scale

    def run_stages(self, pipeline: Any, *step: Any) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses on the last stage, 0 on others.

        `step` is (run, tensors, others, count) as in `pipeline_step`, but with a `run` that returns losses *
        `loss_scale`. The last backward averages gradients over dp if each rank runs one stage; else `sum_over_dp` does.
        """
        reducer, places = self.calls.reducer, pipeline.places
        before_last = reducer.last_backward if places.num_stages == places.pp else None
        with reducer.no_sync():
            return pipeline_step(pipeline, *step, before_last=before_last)

    def sum_over_dp(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        """Sum gradients over dp at the end of a step where an engine or ZeRO has to; by default do nothing: hooks average
        them, which is the sum, as each loss was multiplied by the number of dp ranks (`loss_scale`).
        """

    def own_backward_ended(self, parameters: list[nn.Parameter], mesh: Mesh, paused: bool) -> None:
        """Do nothing after a backward in the user's own loop (without `train_step`): hooks have reduced all gradients.

        ZeRO (`Sharded`) overrides this method: it releases gathered parameters and averages gradients of adapters.
        `parameters` are this rank's trained ones; `paused` is True within `model.no_sync()`, where nothing is averaged.
        """

    def clip_grad_norm_(self, model: Any, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most `max_norm`; return the norm before."""
        named = list(model.named_parameters())
        norm = gradients.global_norm(named, model._slapo.plan)
        gradients.scale([p for _, p in named], max_norm, norm)
        return norm

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        """Return {name: tensor, unsharded over dp} of this rank's parameters and buffers; with `grads`, the gradients.

        Under ZeRO this is a collective call over dp. A missing gradient is returned as zeros.
        """
        found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        if grads:
            return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}
        return found | dict(model.named_buffers(remove_duplicate=False))

    def kept(self, model: Any) -> dict[str, Tensor]:
        """Return {name: parameter or buffer} that this rank writes to a checkpoint; under ZeRO its rows of each."""
        return self.tensors(model)

    def whole_of(self, value: Any, p: Any, shape: tuple[int, ...]) -> Any:
        """Return `value` as it is; ZeRO (`Sharded`) overrides this method, and gathers `value` over dp by a collective.

        Args:
            value: a parameter, its gradient or optimizer state; ZeRO gathers only tensors of the size of `p`.
            p: the parameter that `value` belongs to.
            shape: shape of the parameter before ZeRO, i.e. sharded over tp only.
        """
        return value

    def sends(self, mesh: Mesh) -> bool:
        """Return True: this rank may send its tensors in `stream_weights`. `Sharded` (ZeRO) overrides this method."""
        return True

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        """Return {name: this rank's parameter or buffer} and `optimizer`, for a checkpoint; FSDP2 gathers over dp."""
        return Whole({**dict(model.named_parameters()), **dict(model.named_buffers())}, optimizer)


def within_engine(model: Any) -> AbstractContextManager[None]:
    """Context in which an engine (DDP) calls `model`: the call runs the model's own forward only, no checks."""
    return replaced(model._slapo, "within_engine", True)


class Native(DataParallel):
    """Data parallelism by an object of an engine (a DDP module) that runs the model and averages gradients over dp.

    Args:
        native: the engine's own object around the model, e.g. a DDP module.
        loss_scale: factor of the loss that turns the engine's average over dp into a sum: the number of ranks,
            or 1 where the engine sums.
    """

    def __init__(self, native: Any, loss_scale: float = 1.0):
        self.native, self.loss_scale = native, loss_scale

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        """Run a forward through the engine's object (e.g. DDP) with arguments `batch`; return the model's output."""
        with within_engine(model):
            return self.native(**batch)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the engine averages over dp only if `is_last`."""
        return nullcontext() if is_last else self.native.no_sync()


def use_engine(model: Any, engine: DataParallel, divides: bool = False) -> None:
    """Let an engine, such as DDP or DeepSpeed, run a model and reduce its gradients over dp.

    Args:
        model: a scheduled model.
        engine: replacement of the default `DataParallel`.
        divides: True if the engine (FSDP2) trains sharded tensors of its own, not the model's parameters: gradient
            hooks never run, and the model gets a new `Calls` (hooks' state), so that the old parameters are freed.
    """
    runtime = model._slapo
    calls = runtime.calls = Calls(runtime, runtime.schedule.mesh) if divides else runtime.calls
    calls.divided_parameters, calls.guard.needed = divides, not engine.clips_itself
    calls.reducer.over_dp = False
    runtime.data_parallel, engine.calls = engine, calls


def use_hooks(runtime: Any) -> None:
    """Make hooks, not an engine such as DDP, reduce a model's gradients: put new `DataParallel` and `Calls` objects
    into `runtime`, the model's state. `Calls.prepare` registers the hooks.
    """
    engine, runtime.calls = DataParallel(), Calls(runtime, runtime.schedule.mesh)
    engine.loss_scale = float(runtime.schedule.mesh.size("loss"))
    runtime.data_parallel, engine.calls = engine, runtime.calls


def sum_partial_gradients_in_backward(model: Any) -> None:
    """Hook the model's parameters to sum gradients over tp only; an engine (DDP) averages them over dp itself."""
    model._slapo.calls.reducer.over_dp = False
    model._slapo.calls.prepare(model)
