"""One training step on any mesh: micro-batches, the pipeline, and the sums of gradients."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.dp.data_parallel import DataParallel
from slapo_zoo.dp.dp_shard import Sharded
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.gradients.batch_check import check_batch
from slapo_zoo.gradients.completion import others
from slapo_zoo.gradients.input_gradients import InputGradients
from slapo_zoo.gradients.parameter_hooks import on_parts, run_later
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.losses.loss_means import LABELS, GlobalMeans, count_targets, targets_of
from slapo_zoo.losses.vocab_parallel import VocabLogits
from slapo_zoo.parallel.known import knowing
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS, TIED
from slapo_zoo.pipeline.runtime import FOR_LOSS, ROWS, Pipeline, share_output, split_batch
from slapo_zoo.step import own_loss
from slapo_zoo.step.input_errors import explained
from slapo_zoo.step.outputs import as_dict, refuse_outputs
from slapo_zoo.step.runtime import (
    Runtime,
    calling,
    count_rows,
    refuse_divided,
    takes_cache,
    tokens_divide,
)
from slapo_zoo.step.step_counts import ask

SAMPLED, SAME = 1024, 1e-9  # elements of a copy that are compared; rounding of their sum


@dataclass(frozen=True)
class StepOptions:
    """How one batch is trained on: see `Scheduled.train_step`."""

    micro_batches: int | None = None
    return_logits: bool = False
    targets: Sequence[float | Tensor] | None = None
    loss_fn: Callable[[Any, dict[str, Any]], Tensor] | None = None
    scaler: Any = None


def train_step(model: Any, batch: Mapping[str, Any], options: StepOptions) -> Any:
    """Forward and backward of one batch: see `Scheduled.train_step`."""
    runtime: Runtime = model._slapo
    mesh, stream, targets = model.mesh, runtime.schedule.state.random, options.targets
    own_loss.require_gradients()
    if options.loss_fn is not None:
        batch = own_loss.for_loss_alone(runtime.own_forward, batch)
    tensors, whole = split_batch(batch)
    if takes_cache(runtime):
        whole["use_cache"] = False
    rows = count_rows(tensors)
    if not rows:
        raise _no_rows(batch, mesh)
    refuse_outputs(model, whole)
    as_dict(model, whole)
    _require_head(model.unscheduled_class, batch)
    if options.loss_fn is None and mesh.pp > 1:
        _require_labels(tensors, whole)
    count = _micro_batches(runtime, mesh, rows, options.micro_batches)
    refuse_divided(model, whole, micro_batches=count, pp=mesh.pp, dp=mesh.dp)
    _require_rows(tensors, whole, rows, count)
    name, device = runtime.head_name(model), next(iter(tensors.values())).device
    if options.loss_fn is None:
        items = whole.pop("num_items_in_batch", None)  # of transformers: on all dp ranks
        targets = [items / mesh.dp] if items is not None and targets is None else targets
    is_part = options.loss_fn is None and (count * mesh.dp > 1 or targets is not None)
    counts = targets if targets is not None else count_targets(name, tensors) if is_part else []
    divided = tokens_divide(model, own_loss.of_model({**tensors, **whole}))
    runtime.schedule.state.forward = ForwardContext(divided, is_call=True)
    asked = ask(model, tensors, counts, rows, whole)
    runtime.completion.asks_hosts = asked.missed
    step, kept = stream.step + 1, LogitsKept() if options.return_logits else None
    check_batch(mesh, tensors, step, model.input_check_interval, partial(on_parts, model))
    tensors[ROWS] = asked.rows(rows)  # last: the pipeline's device is the first's
    parts = count * mesh.dp
    own = options.loss_fn and own_loss.OwnLoss(
        options.loss_fn, own_loss.divisor_of(targets, asked.totals, parts), runtime
    )
    loss_of, scale = own or _loss, _loss_scale(options.scaler, device)
    counted = targets_of(name, tensors) if targets is None else None
    means = GlobalMeans(asked.totals, counted, mesh.group("dp"))

    def run(part: Mapping[str, Any], part_rows: Tensor) -> Tensor:
        """The loss of one micro-batch, its means taken over the whole batch."""
        place = stream.at(step, int(part_rows[0]), len(part_rows))
        inputs = own_loss.of_model(part)
        over = means.over(model, targets_of(name, part)) if is_part else nullcontext()
        first = int(part_rows[0]) - asked.first
        numbers = asked.of_rows(first, len(part_rows), own is not None, kept is not None)
        with (
            explained(model, inputs),
            place,
            over,
            knowing(numbers),
            calling(model, inputs, divided),
        ):
            output = runtime.data_parallel.run(model, inputs)
            runtime.completion.watch(output)
        if kept is not None:
            kept.add(int(part_rows[0]), output)
        loss = loss_of(output, part) * runtime.precision.scale
        beside.see(loss, output)
        return loss if scale is None else loss * scale

    parameters = _trained(model, count, device)
    known, times = runtime.completion.beyond, runtime.data_parallel.loss_scale
    beside = InputGradients(mesh, tensors, known, options.loss_fn, times)
    trains = bool(parameters or beside.given or own)
    _require_trained(trains or mesh.pp > 1)  # another stage may have what is trained
    with runtime.data_parallel.new_gradients(list(parameters.values())), beside.averaged():
        loss = _forward_and_backward(runtime, run, tensors, whole, count)
        _reduce(model, runtime, parameters)
        loss = loss / runtime.precision.scale
        held = [*parameters.values(), *beside.held()]
        run_later(runtime.completion, parameters.values(), runtime.precision.scale)
        runtime.precision.unscale(held, mesh)
    loss, trained = _share(loss if scale is None else loss / scale, mesh, bool(parameters))
    _require_trained(trains or bool(trained))
    averaged = not runtime.completion.paused
    runtime.completion.guard.complete(list(parameters.values()), trained, averaged)
    stream.step = step  # a step that failed has drawn nothing
    return loss if kept is None else kept.output(loss, runtime.pipeline)


def _trained(model: Any, count: int, device: torch.device) -> dict[str, nn.Parameter]:
    """The parameters that take gradients in this step, hooked and found fit for it."""
    runtime: Runtime = model._slapo
    if type(runtime.data_parallel) in (DataParallel, Sharded):
        agree_on_frozen_ties(runtime, device)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    runtime.completion.prepare(model)
    if type(runtime.data_parallel) is DataParallel:  # an engine's hooks are its own affair
        _require_whole_step(model.mesh, parameters, count)
    return parameters


def _require_trained(trains: bool) -> None:
    """Refuse a step without a trained parameter: what peft trains beside a model (prompt tuning) is none of its parameters."""
    if not trains:
        problem = "no parameter takes a gradient, and no input asks for one"
        hint = "unfreeze some; a soft prompt of your own goes into inputs_embeds (docs/your_own_loop.md)"
        raise SlapoError("train_step", "parameters", problem, hint)


def _loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """Return the factor of a GradScaler; the scaler learns the device too."""
    return None if scaler is None else scaler.scale(torch.ones((), device=device))


def agree_on_frozen_ties(runtime: Runtime, device: torch.device) -> None:
    """Freeze a weight that stages share on all of them where one has it frozen; compare its copies.

    One all-reduce of three numbers per weight and group, and one wait: none is unfrozen, since an
    optimizer was made by then.
    """
    ties = runtime.summed(TIED)
    named = dict(runtime.schedule.model.named_parameters()) if ties else {}
    for group in {id(group): group for _, group in ties}.values():
        names = [name for name, other in ties if other is group]
        held = [_state_of_copy(named[name]).to(device) for name in names]
        found = torch.stack(held)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        for name, (trained, least, most) in zip(names, found.tolist(), strict=True):
            if least + most < -SAME * least:
                problem = (
                    f"the stages that share it hold copies that differ: {least:.6g}, {-most:.6g}"
                )
                hint = "change and step it alike on all ranks; load the last checkpoint again"
                raise MeshError("train_step", name, problem, hint)
            if not trained:
                named[name].requires_grad_(False).grad = None


def _state_of_copy(p: nn.Parameter) -> Tensor:
    """Return whether it is trained, how large some of its elements are, and minus that."""
    sample = p.detach().reshape(-1)
    size = sample[:: max(1, len(sample) // SAMPLED)].double().abs().sum()
    return torch.stack([torch.full_like(size, p.requires_grad), size, -size])


def _require_whole_step(mesh: Mesh, parameters: Mapping[str, nn.Parameter], count: int) -> None:
    """A hook of someone else takes a gradient in the first backward that makes it."""
    if mesh.pp * count > 1 and any(others(p) for p in parameters.values()):
        found = f"pp={mesh.pp}, {count} micro-batches"
        problem = f"{found}: it would step before the gradient is complete"
        hint = "step after train_step, or use pp=1 and micro_batches=1"
        raise SlapoError("train_step", "a hook that takes gradients", problem, hint)


def _no_rows(batch: Mapping[str, Any], mesh: Mesh) -> SlapoError:
    """The error for a batch of no tensors, or of tensors without rows."""
    names = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim]
    if not names:
        problem = f"found no tensor with rows among {list(batch)}"
        return SlapoError("train_step", "batch", problem, "pass input_ids and labels")
    problem = f"found 0 rows in {names} on dp rank {mesh.coord('dp')}, expected at least 1"
    hint = "leave out the short last batch (drop_last=True), or add a row whose labels are all -100"
    return SlapoError("train_step", "batch", problem, hint)


def _require_head(cls: Any, batch: Mapping[str, Any]) -> None:
    """A model without a head would swallow the labels among its **kwargs."""
    if "labels" in batch and "labels" not in inspect.signature(cls.forward).parameters:
        problem = f"{cls.__name__} has no head: its forward takes no labels, so there is no loss"
        hint = 'name a class that has one when loading, e.g. auto_class="AutoModelForCausalLM"'
        raise SlapoError("train_step", "labels", problem, hint)


class LogitsKept:
    """The logits of all micro-batches, on the rank of the last stage.

    rewrite:  logits of micro-batch 0, 1, ...  -->  logits of the batch, on every pp and tp rank
    """

    def __init__(self) -> None:
        self.cls: Any = None
        self.parts: dict[int, dict[str, Tensor]] = {}

    def add(self, first_row: int, output: Any) -> None:
        """Keep what a head returned for the rows from `first_row`."""
        self.cls = type(output)
        found = {k: v for k, v in output.items() if k.endswith("logits") and v is not None}
        whole = {k: v.gathered() if isinstance(v, VocabLogits) else v for k, v in found.items()}
        self.parts[first_row] = {k: v.detach() for k, v in whole.items()}

    def output(self, loss: Tensor, pipeline: Pipeline | None) -> Any:
        """The model's own output object with the loss and the logits of all rows."""
        parts = [self.parts[row] for row in sorted(self.parts)]
        names = parts[0] if parts else ()
        whole = {name: torch.cat([part[name] for part in parts]) for name in names}
        here = self.cls(loss=loss, **whole) if self.cls else None
        return here if pipeline is None else share_output(pipeline, here, loss.device)


def _micro_batches(runtime: Runtime, mesh: Mesh, rows: int, asked: int | None) -> int:
    """How many equal parts the rows are divided into: asked for, or the default."""
    count = runtime.micro_batches if asked is None else asked
    if count is None and runtime.batch_statistics and mesh.pp > 1:
        warnings.warn(
            "BatchNorm takes its statistics per micro-batch: one is used, as in one process, and the "
            f"{mesh.pp} stages take turns; pass micro_batches= to let them overlap",
            stacklevel=4,
        )
        count = 1
    count = _default_micro_batches(rows, runtime.pipeline) if count is None else count
    legal = [i for i in range(1, rows + 1) if rows % i == 0]
    if count not in legal:
        problem = f"{rows} rows cannot be divided into {count} equal micro-batches"
        raise MeshError("train_step", "micro_batches", problem, f"legal numbers: {legal}")
    return count


def _require_rows(tensors: dict[str, Tensor], whole: dict, rows: int, count: int) -> None:
    """Refuse tensors that have no row for each row of the batch; several images per row are allowed."""
    other = [f"{n.removeprefix(FOR_LOSS)} {list(x.shape)}" for n, x in tensors.items()
             if len(x) % rows or (x.ndim == 1 and len(x) != rows)]  # fmt: skip
    other += [n for n in ("encoder_outputs", "past_key_values") if whole.get(n) is not None]
    if count > 1 and other:
        problem = f"{rows} rows go into {count} micro-batches, but not {', '.join(other)}"
        hint = "give each row its own, leave to loss_fn what is of no row, or pass micro_batches=1"
        raise SlapoError("train_step", "batch", problem, hint)


def _default_micro_batches(rows: int, pipeline: Pipeline | None) -> int:
    """One without a pipeline; else the first number that keeps all stages busy in its order."""
    if pipeline is None:
        return 1
    places = pipeline.places
    if places.custom is not None:
        return places.custom.micro_batches
    legal = [i for i in range(1, rows + 1) if rows % i == 0 and places.admits(i)]
    return next((i for i in legal if i >= 2 * places.pp), legal[-1] if legal else rows)


def _forward_and_backward(
    runtime: Runtime, run: Callable, tensors: dict[str, Tensor], whole: dict, count: int
) -> Tensor:
    if runtime.pipeline is None:
        return _accumulate(runtime.data_parallel, run, tensors, whole, count)
    return runtime.data_parallel.pipeline_step(runtime.pipeline, run, tensors, whole, count)


def _require_labels(tensors: Mapping[str, Tensor], whole: Mapping[str, Any]) -> None:
    """Without a loss of one's own: a stage would learn only late that there is none."""
    if not (any(name in tensors for name in LABELS) or whole.get("return_loss")):
        raise _no_loss(f"found no labels among {list(tensors)}")


def _no_loss(problem: str) -> SlapoError:
    return SlapoError("train_step", "batch", f"no loss: {problem}", "put labels into the batch")


def _loss(output: Any, _part: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise _no_loss("the model returned none")
    return loss.float()


def _accumulate(
    engine: DataParallel, run: Callable, tensors: dict[str, Tensor], others: dict, count: int
) -> Tensor:
    """Micro-batches one after the other, without a pipeline."""
    total: Any = 0.0
    for i in range(count):
        part = {k: v.tensor_split(count)[i] for k, v in tensors.items()}
        rows = part.pop(ROWS)
        with engine.micro_batch(is_last=i == count - 1):
            loss = run({**part, **others}, rows)
            engine.backward(loss)
        total = total + loss.detach()
    return total


def _reduce(model: Any, runtime: Runtime, parameters: dict[str, nn.Parameter]) -> None:
    """Sum gradients over tied stages, over tp where they are partial, and over dp."""
    engine = runtime.data_parallel
    engine.sum_over_dp(list(parameters.values()), model.mesh)
    for name, group in (*runtime.summed(TIED), *runtime.summed(REPLICAS)):
        engine.sum_over_tp(parameters, [name], group)
    tokens_sharded = runtime.schedule.state.forward.tokens_divided
    rows = runtime.plan.tensors.values()
    names = sorted(row.name for row in rows if row.sums(tokens_sharded, PARTIAL))
    engine.sum_over_tp(parameters, names, model.mesh.group("tp"))


def _share(loss: Tensor, mesh: Mesh, trains: bool) -> tuple[Tensor, Tensor]:
    """The global loss on every rank, and how many ranks of pp and dp have something to train.

    Terms of all micro-batches were divided by global counts.
    """
    both = torch.stack([loss.detach(), torch.full_like(loss.detach(), float(trains))])
    for mesh_dim in ("pp", "dp"):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(both, group=mesh.group(mesh_dim))
    return both[0], both[1]
