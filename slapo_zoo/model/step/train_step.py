"""One training step on any mesh: check and split the batch, run micro-batches, reduce gradients, share the loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.cut_body import own_lengths, sharding
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.model.dp.data_parallel import DataParallel
from slapo_zoo.model.dp.dp_shard import Sharded
from slapo_zoo.model.gradients.batch_check import check_batch
from slapo_zoo.model.gradients.input_gradients import InputGradients
from slapo_zoo.model.gradients.parameter_hooks import on_parts, run_later
from slapo_zoo.model.step import own_loss, step_checks
from slapo_zoo.model.step.cut_batch import whole_batch
from slapo_zoo.model.step.input_errors import explained
from slapo_zoo.model.step.of_all_tokens import (
    cut_of,
    cut_step,
    means_of_all,
    of_all_tokens,
    tokens_of,
)
from slapo_zoo.model.step.outputs import refuse_outputs, set_return_dict
from slapo_zoo.model.step.runtime import (
    Runtime,
    calling,
    count_rows,
    refuse_divided,
    tokens_divide,
)
from slapo_zoo.model.step.step_counts import StepCounts, count_step
from slapo_zoo.parallel.known import knowing
from slapo_zoo.parallel.losses.loss_means import GlobalMeans, count_targets, targets_of
from slapo_zoo.parallel.token_cut import TokenCut, cutting
from slapo_zoo.pipeline.pipeline_runtime import ROWS, Pipeline, share_output, split_batch
from slapo_zoo.zoo.table import families

# (entries with a batch axis, other entries, rows, micro-batches) of a batch
Checked = tuple[dict[str, Tensor], dict[str, Any], int, int]


@dataclass(frozen=True)
class StepOptions:
    """Arguments of `Scheduled.train_step`, without the batch.

    Args:
        micro_batches: number of micro-batches with equally many rows; None takes the model's default.
        return_logits: True returns the model's output object with the loss and all logits, not the loss alone.
        targets: for gradients accumulated over several batches: for each loss term the number of labels that count, in
            all of these batches on this dp rank; None counts those of this batch.
        loss_fn: the user's own loss: (model's output, micro-batch) --> scalar; None for the model's.
        scaler: a GradScaler, or None.
        batch_is_sharded: True if each cp rank passes only its own tokens of the batch, False if all tokens.
    """

    micro_batches: int | None = None
    return_logits: bool = False
    targets: Sequence[float | Tensor] | None = None
    loss_fn: Callable[[Any, dict[str, Any]], Tensor] | None = None
    scaler: Any = None
    batch_is_sharded: bool = False


@dataclass(frozen=True)
class Step:
    """State of one training step: a batch that is split over dp ranks and micro-batches, and how to train on it.

    Args:
        model: a scheduled model.
        tensors: name --> entry with a batch axis, which micro-batches split by rows; one more entry, under the key
            ROWS, holds the rows' indices in the batch of all dp ranks.
        whole: name --> entry without a batch axis, which every micro-batch gets.
        count: number of micro-batches.
        parameters: name --> trained parameter.
        number: number of the step, from which its dropout is seeded.
        asked: numbers of targets (labels other than -100) per loss term on all dp ranks, and of real tokens (no
            padding) in each of this rank's rows.
        means: makes the model divide a micro-batch's sum of losses by the step's number of targets; None: not needed.
        own: the user's own loss, or None for the model's.
        beside: tensors outside the model that get gradients (a soft prompt).
        scaler: a GradScaler, or None.
        kept: store of the logits of all micro-batches if the step returns them, else None.
    """

    model: Any
    tensors: dict[str, Tensor]
    whole: dict[str, Any]
    count: int
    parameters: dict[str, nn.Parameter]
    number: int
    asked: StepCounts
    means: GlobalMeans | None
    own: own_loss.OwnLoss | None
    beside: InputGradients
    scaler: Any
    kept: "LogitsKept | None"

    @property
    def runtime(self) -> Runtime:
        """Return the runtime state of the model: how it is sharded, its pipeline stages, gradient hooks and engine."""
        return self.model._slapo

    @property
    def trains(self) -> bool:
        """Return whether any tensor takes a gradient on this rank."""
        return bool(self.parameters or self.beside.given or self.own)

    def loss_of(self, part: Mapping[str, Any], rows: Tensor) -> Tensor:
        """Run the forward of the micro-batch `part`, whose rows have the global indices `rows` [B]. Return its share of
        the step's loss (the shares of all micro-batches and ranks sum to the loss), multiplied by fp16's loss scale.
        """
        model, runtime = self.model, self.runtime
        state, first, inputs = runtime.schedule.state, int(rows[0]), own_loss.of_model(part)
        numbers = self.asked.of_rows(
            first - self.asked.first, len(rows), self.own is not None, self.kept is not None
        )
        draws = state.random.at(self.number, first, len(rows))
        head = runtime.head_name(model)
        # of a derived family or changed inputs only: on a GPU the comparison makes the host wait
        changes = runtime.table.model_type not in families() or model._forward_pre_hooks
        counts = count_targets(head, part) if changes else ()
        over = (model, targets_of(head, part), counts)
        means = nullcontext() if self.means is None else self.means.over(*over)
        divided, cut = state.forward.tokens_divided, state.forward.cut
        batch_cut = None if state.body else cut
        given = own_loss.of_loss(part, batch_cut)
        if shows_all := batch_cut is not None and self.own is not None:
            means = means_of_all(model, given)
        with explained(model, inputs), draws, means, knowing(numbers), calling(model, inputs, divided, cut):  # fmt: skip
            with sharding(state, cut):
                output = runtime.data_parallel.run(model, inputs)
            output = of_all_tokens(cut, output, given) if shows_all else output
            runtime.calls.watch(output)
        if self.kept is not None:
            self.kept.add(first, output)
        loss = (self.own or _loss)(output, part) * runtime.precision.scale
        if self.own is None and self.means is not None and self.count * model.mesh.size("loss") > 1:
            self.means.require_sum(output.loss)
        self.beside.add_from_loss(loss, output)
        return loss if self.scaler is None else self.scaler.scale(loss)


def train_step(model: Any, batch: Mapping[str, Any], options: StepOptions) -> Any:
    """Run forward and backward of one batch on all ranks; return the loss, or with `options.return_logits` the model's
    output object with it.
    """
    cut, batch = cut_of(model), _on_device(model, batch)
    if options.batch_is_sharded and cut is not None:
        batch = whole_batch(cut, batch)
    step = split(model, options, check(model, batch, options))
    parameters, stream = list(step.parameters.values()), step.runtime.schedule.state.random
    with (
        step.runtime.data_parallel.new_gradients(parameters),
        step.beside.averaged(),
        cutting(stream, cut),
    ):
        loss = run(step)
        reduce(step)
    return share(step, loss)


def _on_device(model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `batch` with its CPU tensors copied to the model's device; SlapoError if it is no mapping."""
    if not isinstance(batch, Mapping):
        problem = f"found a {type(batch).__name__}, expected a dictionary of tensors by name"
        hint = "pass what the tokenizer or collator returns"
        raise SlapoError("train_step", "batch", problem, hint)
    device = next(model.parameters()).device
    there = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.device.type == "cpu"}
    return {**batch, **{k: v.to(device) for k, v in there.items()}}


def check(model: Any, batch: Mapping[str, Any], options: StepOptions) -> Checked:
    """Return a step's batch as (entries with a batch axis, other entries, number of rows, number of micro-batches);
    SlapoError on bad input, in `batch` or in `options`, the other arguments of the step.
    """
    runtime, mesh, own = model._slapo, model.mesh, options.loss_fn is not None
    own_loss.require_gradients()
    batch = own_loss.for_loss_alone(runtime.own_forward, batch) if own else batch
    tensors, whole = split_batch(batch)
    if not (rows := count_rows(tensors)):
        raise step_checks.no_rows(batch, mesh)
    refuse_outputs(model, whole)
    step_checks.require_head(model.unscheduled_class, batch)
    if not own:
        step_checks.require_labels(tensors, whole, mesh)
    count = step_checks.count_micro_batches(runtime, mesh, rows, options.micro_batches)
    parts = {"micro_batches": count, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.size("batch")}
    refuse_divided(model, whole, own, **parts)
    step_checks.require_rows(tensors, whole, rows, count)
    if accepts(model.unscheduled_class, "use_cache"):
        whole["use_cache"] = False
    set_return_dict(model, whole)
    return tensors, whole, rows, count


def split(model: Any, options: StepOptions, checked: Checked) -> Step:
    """Return the Step that trains on a batch, as `check` returned it: its micro-batches are slices of its rows, which get
    indices in the batch of all dp ranks, and tokens are sharded over cp. Collective, on all ranks.
    """
    tensors, whole, rows, count = checked
    runtime, mesh, given, cut = model._slapo, model.mesh, checked[0], cut_of(model)
    state, parts = runtime.schedule.state, count * mesh.size("loss")
    reducer, scale = runtime.calls.reducer, runtime.data_parallel.loss_scale
    batch_cut = None if state.body else cut
    if batch_cut is not None:
        tensors, whole = cut_step(model, batch_cut, tensors, whole, options.loss_fn is not None)
    parameters = _trained(model, count, next(iter(tensors.values())).device)
    targets, counts = _targets(model, options, tensors, whole, parts)
    divided = tokens_divide(model, own_lengths(state, cut, own_loss.of_model({**tensors, **whole})))
    state.forward = ForwardContext(divided, is_call=True, cut=cut)
    asked, number = count_step(model, tensors, counts, rows, whole), state.random.step + 1
    reducer.asks_hosts = asked.missed
    check_batch(mesh, given, number, model.input_check_interval, partial(on_parts, model))
    tensors[ROWS] = asked.rows(rows)  # last, since the pipeline takes the device of the first entry
    own, means = _losses(model, options.loss_fn, tensors, targets, asked.totals, parts, batch_cut)
    beside = InputGradients(mesh, tensors, reducer.beyond, options.loss_fn, scale)
    kept = LogitsKept(None if own else batch_cut, {**given, **whole})
    return Step(model, tensors, whole, count, parameters, number, asked, means, own, beside, options.scaler,
                kept if options.return_logits else None)  # fmt: skip


def _losses(
    model: Any, loss_fn: Any, tensors: Mapping[str, Tensor], targets: Any, totals: Any, parts: int, cut: Any
) -> tuple[own_loss.OwnLoss | None, GlobalMeans | None]:  # fmt: skip
    """Return `own` and `means` of a Step: how the loss of a micro-batch becomes its share of the step's loss. `targets`
    are the numbers of targets that the caller passed, or None; `totals` those of all dp ranks. `parts` counts
    micro-batches of all dp and cp ranks; `cut` says which tokens of the batch's entries `tensors` each cp rank has.
    """
    if loss_fn is not None:
        divisor = own_loss.divisor_of(targets, totals, parts)
        return own_loss.OwnLoss(loss_fn, divisor, model._slapo, cut), None
    if parts == 1 and targets is None:
        return None, None
    counted = targets_of(model._slapo.head_name(model), tensors) if targets is None else None
    return None, GlobalMeans(totals, counted, model.mesh.group("loss"))


def _targets(
    model: Any, options: StepOptions, tensors: Mapping[str, Tensor], whole: dict[str, Any], parts: int
) -> tuple[Any, Sequence[Any]]:  # fmt: skip
    """Return two lists with a number of targets (labels that count in the mean loss) per loss term: those that the
    caller passed, as `targets=` or `num_items_in_batch`, or None; and this rank's, to be summed over dp and cp. If
    numbers were passed, the second list is the first. If not, it is [] where a loss_fn or a step of one micro-batch in
    all needs none. `tensors` are the entries of the batch with a batch axis, `whole` the others, from which
    `num_items_in_batch` is removed unless there is a loss_fn; `parts` counts micro-batches of all dp and cp ranks.
    """
    targets = options.targets
    if options.loss_fn is None:
        items = whole.pop("num_items_in_batch", None)  # from transformers: over all dp ranks
        if items is not None and targets is None:
            targets = [items / model.mesh.size("batch")]
        # it counts all tokens; this rank has 1 / cp of them, if the batch is sharded
        ranks = 1 if model._slapo.schedule.state.body else model.mesh.size("cp")
        if targets is not None and ranks > 1:
            targets = [n / ranks for n in targets]
    if targets is not None or options.loss_fn is not None or parts == 1:
        return targets, targets or []
    return None, count_targets(model._slapo.head_name(model), tensors)


def run(step: Step) -> Tensor:
    """Run all micro-batches; return this rank's share of the loss. Over pp, dp and cp the shares sum to the loss."""
    runtime = step.runtime
    engine, pipeline = runtime.data_parallel, runtime.pipeline
    trains = step.trains or step.model.mesh.pp > 1  # another stage may
    step_checks.require_trained(trains, runtime.peft_config)
    given = step.tensors, step.whole, step.count
    if pipeline is None:
        loss = _accumulate(engine, step.loss_of, *given)
    else:
        with explained(step.model, step.tensors):
            loss = engine.pipeline_step(pipeline, step.loss_of, *given)
    loss = loss / runtime.precision.scale
    return loss if step.scaler is None else loss / step.scaler.scale(torch.ones_like(loss))


def reduce(step: Step) -> None:
    """Complete the gradients of a step: sums over ranks, the user's gradient hooks, division by fp16's loss scale."""
    runtime, mesh, named = step.runtime, step.model.mesh, step.parameters
    parameters, reducer = list(named.values()), runtime.calls.reducer
    runtime.data_parallel.sum_over_dp(parameters, mesh)
    reducer.finish(named)
    run_later(reducer, parameters, runtime.precision.scale)
    runtime.precision.unscale([*parameters, *step.beside.held()], mesh)


def share(step: Step, loss: Tensor) -> Any:
    """Sum this rank's share of the loss, `loss`, over pp, dp and cp; return the sum on every rank or, with
    `return_logits`, the output object with the sum as loss and with all logits.
    """
    runtime, mesh, named = step.runtime, step.model.mesh, step.parameters
    loss = loss.detach().float()  # as on ranks of pp without a loss
    both = torch.stack([loss, torch.full_like(loss, float(bool(named)))])
    for mesh_dim in ("pp", "loss"):  # losses were divided by global counts, so they add up
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(both, group=mesh.group(mesh_dim))
    loss, trained = both  # `trained`: ranks of pp and dp that have something to train
    step_checks.require_trained(step.trains or bool(trained))
    averaged = not runtime.calls.reducer.paused
    runtime.calls.guard.complete(named, runtime.plan, averaged, trained)
    runtime.schedule.state.random.step = step.number  # only now: a failed step can be repeated
    return loss if step.kept is None else step.kept.output(loss, runtime.pipeline)


def _trained(model: Any, count: int, device: torch.device) -> dict[str, nn.Parameter]:
    """Return {name: parameter} that this step trains on this rank, after gradient hooks were registered. SlapoError if
    a hook of the user would see a gradient before all `count` micro-batches are added. Collective, on `device`, over
    stages that hold one tied weight: they all freeze it if one has; MeshError if its values differ.
    """
    runtime: Runtime = model._slapo
    if type(runtime.data_parallel) in (DataParallel, Sharded):
        step_checks.agree_on_frozen_ties(runtime, device)
    parameters = {name: p for name, p in runtime.calls.prepare(model) if p.requires_grad}
    if type(runtime.data_parallel) is DataParallel:  # engines handle such hooks themselves
        step_checks.require_whole_step(model.mesh, parameters, count)
    return parameters


def _loss(output: Any, _part: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise step_checks.no_loss("the model returned none")
    return loss.float()


def _accumulate(
    engine: DataParallel, run: Callable, tensors: dict[str, Tensor], others: dict, count: int
) -> Tensor:
    """Run `count` micro-batches one after the other, without a pipeline; return the step's loss, summed over them.
    `run` maps (micro-batch, its rows' indices in the batch of all dp ranks) to its share of the loss; `engine` runs
    each backward and reduces the gradients over dp. Micro-batches split the entries `tensors` of the batch by rows, and
    each gets all of `others`.
    """
    total: Any = 0.0
    for i in range(count):
        part = {k: v.tensor_split(count)[i] for k, v in tensors.items()}
        rows = part.pop(ROWS)
        with engine.micro_batch(is_last=i == count - 1):
            loss = run({**part, **others}, rows)
            engine.backward(loss)
        total = total + loss.detach()
    return total


class LogitsKept:
    """Store of the logits of all micro-batches on the ranks of the last stage: `add` stores those of one micro-batch,
    `output` sends all to the other ranks and returns them.

    rewrite:  logits of micro-batch 0, 1, ...  -->  logits of the batch, on every pp and tp rank

    Args:
        cut: object that knows which tokens each cp rank has, and gathers them; None if logits have all tokens.
        given: the batch with all tokens, which tells the number of a row's logits.
    """

    def __init__(self, cut: TokenCut | None, given: Mapping[str, Any]) -> None:
        self.cut, self.given, self.cls = cut, given, None
        self.parts: dict[int, dict[str, Tensor]] = {}

    def add(self, first_row: int, output: Any) -> None:
        """All-gather the logits in a micro-batch's `output` over tp and cp, and store them under `first_row`, the index
        of their first row in the batch of all dp ranks. The tp and cp ranks of the last stage call this together.
        """
        self.cls = type(output)
        found = {k: v for k, v in output.items() if k.endswith("logits") and v is not None}
        whole = {k: v.gathered() if isinstance(v, VocabLogits) else v for k, v in found.items()}
        if self.cut is not None:
            gathered = {k: self.cut.whole_of_numbers(v.detach(), 1) for k, v in whole.items()}
            tokens = tokens_of("logits", self.given)
            whole = {k: v.narrow(1, 0, tokens) for k, v in gathered.items()}
        self.parts[first_row] = {k: v.detach() for k, v in whole.items()}

    def output(self, loss: Tensor, pipeline: Pipeline | None) -> Any:
        """Return the output object with `loss` and all logits; with a `pipeline` it is broadcast by the last stage."""
        parts = [self.parts[row] for row in sorted(self.parts)]
        names = parts[0] if parts else ()
        whole = {name: torch.cat([part[name] for part in parts]) for name in names}
        here = self.cls(loss=loss, **whole) if self.cls else None
        return here if pipeline is None else share_output(pipeline, here, loss.device)
