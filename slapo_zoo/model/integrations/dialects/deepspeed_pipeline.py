"""Run our stages in DeepSpeed's own pipeline: one layer per stage, tied weights as TiedLayerSpec.

DeepSpeed orders the micro-batches (1F1B), sends tensors between stages, sums tied gradients, clips and
steps. Each stage calls the model's own forward, of which only the stage's modules run.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.model.dp.data_parallel import (
    DataParallel,
    sum_partial_gradients_in_backward,
    use_engine,
)
from slapo_zoo.model.integrations.dialects.engine import TargetEngine, made_optimizer
from slapo_zoo.model.integrations.dialects.zero_state import Zero
from slapo_zoo.parallel.rank_plan import TIED
from slapo_zoo.pipeline.pipeline_runtime import ROWS, Pipeline
from slapo_zoo.pipeline.stages import StageDone


def pipeline_engine(
    deepspeed: Any, model: Any, settings: dict[str, Any], optimizer: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Return (engine with `update(batch)` for a step, optimizer) of a model that DeepSpeed runs in pipeline stages.

    Args:
        deepspeed: the module deepspeed.
        model: a scheduled model with pp > 1.
        settings: DeepSpeed's config.
        optimizer: torch optimizer, or a function parameters --> optimizer; None takes the config's.
        options: further options of deepspeed.initialize.
    """
    pipeline: Pipeline = model._slapo.pipeline
    if pipeline.places.num_stages != model.mesh.pp:
        problem = f"found {pipeline.places.num_stages} stages, expected pp={model.mesh.pp}"
        hint = "load without pipeline_order= and stages_per_rank=: DeepSpeed runs one stage per rank, as 1F1B"
        raise MeshError("target='deepspeed'", "stages_per_rank", problem, hint)
    sum_partial_gradients_in_backward(model)
    step = Step()
    module = _module(deepspeed, model, step)
    parameters = [p for p in module.parameters() if p.requires_grad]
    made = made_optimizer(optimizer, parameters)
    groups = [list(g["params"]) for g in made.param_groups] if made else [parameters]
    native, ds_optimizer, *_ = deepspeed.initialize(
        model=module, optimizer=made, model_parameters=None if made else parameters,
        config=settings, dist_init_required=False, **options,
    )  # fmt: skip
    use_engine(model, _ZeroPipeline(native, step, groups))
    return PipelineTarget(model, native, ds_optimizer), ds_optimizer


class PipelineTarget(TargetEngine):
    """Scheduled model in DeepSpeed's PipelineEngine `native`, whose training step includes the optimizer step."""

    def update(self, batch: Any, micro_batches: int | None = None) -> Tensor:
        count = self.native.gradient_accumulation_steps()
        if micro_batches not in (None, count):
            problem = f"found {micro_batches}, expected {count} as in DeepSpeed's config"
            hint = "leave micro_batches= out, or set gradient_accumulation_steps in that config"
            raise SlapoError("target='deepspeed'", "micro_batches", problem, hint)
        return self.model.train_step(batch, count)

    train_step = update

    @property
    def grad_norm(self) -> float:
        norm = self.native.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)


class Step:
    """State of the running training step, shared by the layers of DeepSpeed's pipeline.

    Attributes:
        run: function (micro-batch, row indices) --> its share of the loss; raises StageDone on stages but the last.
        parts: for each micro-batch its slices of the entries that are split by rows, and its row indices.
        others: entries of the batch that every micro-batch gets unsplit.
        plan: StagePlan, which says which tensors the stage receives and sends.
        loss_scale: factor of a micro-batch's loss that undoes DeepSpeed's means over dp and micro-batches.
    """

    run: Callable[..., Any]
    parts: list[dict[str, Tensor]]
    others: dict[str, Any]
    plan: Any
    loss_scale: float


def _module(deepspeed: Any, model: Any, step: Step) -> Any:
    """Return DeepSpeed's PipelineModule of `model`, with these layers for every stage: its tied weights, then the stage
    itself. `step` is the state of the running step, which the stages read.
    """
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    mesh, layers = model.mesh, []
    ties, mine = _ties(model)
    for stage in range(mesh.pp):
        for key, stages in ties.items():
            tied = TiedLayerSpec(
                key, TiedWeight, mine.get(key), forward_fn=_pass, tied_weight_attr=["weight"]
            )
            layers.append(tied if stage in stages else LayerSpec(nn.Identity))
        layers.append(LayerSpec(StageLayer, model, step))
    topology = PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp)
    return PipelineModule(
        layers, topology=topology, loss_fn=_loss, partition_method="uniform",
        activation_checkpoint_interval=0,
    )  # fmt: skip


def _ties(model: Any) -> tuple[dict[str, list[int]], dict[str, nn.Parameter]]:
    """Return ({tied weight: indices of the stages that hold it}, {tied weight: this rank's parameter}).

    A tied weight is given by its name with "_" in place of ".".
    """
    plan, named = model._slapo.plan, dict(model.named_parameters())
    tied = {row.name: row for row in plan.tensors.values() if row.sums(True, TIED)}
    keys = {name: (row.tied_to or name).replace(".", "_") for name, row in tied.items()}
    stages = {keys[name]: list(tied[name].stages) for name in sorted(tied, key=keys.__getitem__)}
    return stages, {keys[name]: p for name, p in named.items() if name in tied}


class TiedWeight(nn.Module):
    """Layer that holds a stage's copy of a tied `weight`; DeepSpeed sums its gradients over the tied stages."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight


def _pass(module: nn.Module, inputs: Any) -> Any:
    return inputs


def _loss(output: Tensor, number: Tensor) -> Tensor:
    return output


class StageLayer(nn.Module):
    """Layer that DeepSpeed calls for one micro-batch of this stage.

    rewrite:  (tensors received, number of the micro-batch)  -->  (tensors to send, number), or the loss
    """

    def __init__(self, model: Any, step: Step):
        super().__init__()
        self.model, self.step = model, step

    def forward(self, received: Any) -> Any:
        """Run the stage on `received`, a tuple of the tensors from the stage before and, at its end, the index of the
        micro-batch. Return such a tuple for the next stage; on the last stage the loss * `loss_scale`.
        """
        *crossing, number = received if isinstance(received, tuple) else (received,)
        step, cursor = self.step, self.model._slapo.pipeline.cursor
        part = dict(step.parts[int(number)])
        rows = part.pop(ROWS)
        cursor.begin(step.plan, crossing, next(iter(part.values())).device)
        try:
            loss = step.run({**part, **step.others}, rows)
            return loss * step.loss_scale
        except StageDone:
            return (*(_with_gradient(x) for x in cursor.outgoing()), number)
        finally:
            cursor.end()


def _with_gradient(x: Tensor) -> Tensor:
    """Return `x`, which goes to the next stage; if floating it requires a gradient, since DeepSpeed sends one back."""
    return x if x.requires_grad or not x.is_floating_point() else x.detach().requires_grad_()


class _ZeroPipeline(Zero):
    """Data parallelism by ZeRO in DeepSpeed's pipeline; DeepSpeed runs forward, backward and optimizer step in one call."""

    clips_itself = True

    def __init__(self, native: Any, step: Step, groups: list[list[nn.Parameter]]):
        super().__init__(native, groups)
        self.step = step

    run = DataParallel.run  # stages but the last end by StageDone, caught by StageLayer

    def pipeline_step(
        self, pipeline: Pipeline, run: Callable[..., Any], tensors: dict[str, Tensor],
        others: dict[str, Any], count: int,
    ) -> Tensor:  # fmt: skip
        """Run a step of `count` micro-batches; return the loss / (pp * dp), since the caller sums it over these ranks.

        `run`: (micro-batch, row indices) --> its share of the loss; `tensors`: entries of the batch to split by rows;
        `others`: entries that every micro-batch gets unsplit.
        """
        mesh, step = pipeline.schedule.mesh, self.step
        first = {k: v.tensor_split(count)[0] for k, v in tensors.items() if k != ROWS}
        (step.plan,) = pipeline.plans({**first, **others}).values()
        split = {name: tensor.tensor_split(count) for name, tensor in tensors.items()}
        step.parts = [{name: parts[i] for name, parts in split.items()} for i in range(count)]
        step.run, step.others, step.loss_scale = run, others, float(mesh.dp * count)
        self.native.reset_activation_shape()  # another batch may have another length
        loss = self.native.train_batch(_numbers(count))
        return loss.detach().reshape(()) / (mesh.pp * mesh.dp)

    def clip_grad_norm_(self, model: Any, max_norm: float) -> Tensor:
        hint = 'set "gradient_clipping" in DeepSpeed\'s config, and do not call clip_grad_norm_'
        problem = "DeepSpeed's pipeline has run the optimizer step already"
        raise SlapoError("target='deepspeed'", "clip_grad_norm_", problem, hint)

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        if grads:
            hint = "compare weights or losses, or use target='torch'"
            problem = "DeepSpeed's pipeline clears the gradients"
            raise SlapoError("target='deepspeed'", "grads=True", problem, hint)
        return super().tensors(model)


def _numbers(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an iterator of (input, label) pairs for DeepSpeed's pipeline, one per each of `count` micro-batches: both
    are its index, int64 [1], by which `StageLayer` finds its tensors in `Step.parts`.
    """
    numbers = [torch.tensor([i]) for i in range(count)]
    return iter([((number,), number) for number in numbers])  # pyright: ignore[reportReturnType]
