"""Pipeline runtime: run one training step, or one forward, over the stages of all pp ranks."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from slapo_zoo.errors import ScheduleError, SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.cut_attention import follow_places
from slapo_zoo.hf.cut_body import sharding
from slapo_zoo.hf.example_inputs import example_shard
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.token_cut import TokenCut, cut_now
from slapo_zoo.pipeline.busy import Busy
from slapo_zoo.pipeline.data_reads import DataReads
from slapo_zoo.pipeline.dry_run import Found, dry_run, program_of, shared_calls
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.pipeline.stages import Cursor, Foreign, StageDone, StagePlan
from slapo_zoo.pipeline.timeline import Span

ROWS = "_global_rows"  # key of a micro-batch: global row indices, on the CPU
# inputs whose axis 0 is the batch
MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features")
CHANGE_NO_SHAPE = ("cut_pipeline_stage", "checkpoint", "fork_rng")
FOR_LOSS = "_for_loss:"  # prefix of inputs for the user's loss only
# (key of `program_of`, dtype) --> the Schedule of a fake model, while a pipeline uses it
_fakes: WeakValueDictionary[Any, Schedule] = WeakValueDictionary()
_turn = threading.Lock()


class Pipeline:
    """Stages of one model on this rank, and for each shape of a batch the plan of what each stage runs and sends.

    Args:
        schedule: the model, its mesh and the recorded changes to its modules.
        cls: class of the model.
        units: paths of the modules that are never split between stages.
        cursor: follows the forward that runs: which module was called last, tensors received and to be sent.
        places: which rank runs each stage, and the pipeline order (1F1B, ...).
    """

    def __init__(
        self, schedule: Schedule, cls: Any, units: list[str], cursor: Cursor, places: StageMap
    ):
        self.schedule, self.cls, self.units, self.cursor = schedule, cls, units, cursor
        self.places = places
        self.mine = places.stages_of(schedule.mesh.coord("pp"))
        self._plans: dict[Any, tuple[dict[int, StagePlan], DataReads]] = {}
        self.depends_on_data = False  # if the forward branches on data, plans may not hold later
        self._arrivals: dict[int, Any] = {}
        self._fake: Any = None
        self.has_met = False  # a step has run: its ranks are connected
        self.spans: list[Span] | None = None
        self.busy: Busy | None = None
        self.clock: Callable[[], float] = time.monotonic  # the same for all processes of a machine

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy` and `pickle`, without plans and fake model, which the copy makes for itself."""
        return {**self.__dict__, "_plans": {}, "_fake": None, "busy": None, "has_met": False}

    def plans(self, batch: Mapping[str, Any]) -> dict[int, StagePlan]:
        """Return {stage of this rank: its StagePlan} for `batch`. A dry run makes them for new shapes, and for new
        values if the forward branches on the batch's data.
        """
        divided, cut = self.schedule.state.forward.tokens_divided, cut_now()
        shapes = sorted((k, _signature(v)) for k, v in batch.items())
        key = divided, cut is None, self._dtype(), *shapes
        known = self._plans.get(key)
        if known is None or not known[1].hold(batch):
            program = program_of(self.schedule, self.cls, self.units, CHANGE_NO_SHAPE)
            run = partial(self._dry_run, batch, divided, cut)
            calls, reads = shared_calls(program, (cut and cut.way, *key), batch, run)
            self.depends_on_data = self.depends_on_data or bool(reads)
            cuts = self.schedule.state.cuts
            plans = {stage: StagePlan.make(calls, cuts, stage) for stage in self.mine}
            known = self._plans[key] = plans, reads
        return known[0]

    def _dry_run(self, batch: Mapping[str, Any], divided: bool, cut: TokenCut | None) -> Found:
        """Run the forward on fake tensors; return (calls of blocks, embeddings and heads with the shapes that they return,
        DataReads: data of `batch` that the forward read).

        `divided` is True if tokens are sharded over tp; `cut` says how they are sharded over cp, or is None.
        """
        with torch.inference_mode(False):  # training reuses plans of an evaluation
            mode, fake = self.prepare()
            fake.state.forward = ForwardContext(divided)
            cut = cut and TokenCut.of(fake.mesh, cut.way)
            dtype = self.schedule.state.compute_dtype
            batch = {name: hf.as_computed(name, x, dtype) for name, x in batch.items()}
            with sharding(fake.state, cut):
                return dry_run(fake.model, self.units, mode, batch)

    def plans_of_all(self, parts: Sequence[Mapping[str, Any]]) -> dict[int, StagePlan]:
        """Return {stage of this rank: its StagePlan}, which holds for all micro-batches `parts` of a step.

        Raises:
            ScheduleError: the forward branches on data, and another micro-batch would send other values.
        """
        plans = self.plans(parts[0])
        if self.depends_on_data and any(self.plans(part) != plans for part in parts[1:]):
            problem = "the tensors sent between stages depend on the data, and differ between micro-batches"
            hint = "use pp=1, or micro_batches=1"
            raise ScheduleError("pipeline", "micro_batches", problem, hint)
        return plans

    def sends(self, micro_batches: int) -> Any:
        """Return a tracker (`Sends`) of the tensors that this rank sends in one step of `micro_batches` micro-batches."""
        from slapo_zoo.pipeline.in_flight import Sends, arrivals

        if micro_batches not in self._arrivals:
            ranks = self.places.actions(micro_batches)
            rank = self.schedule.mesh.coord("pp")
            self._arrivals[micro_batches] = arrivals(ranks, self.places.rank_of, rank)
        return Sends(self._arrivals[micro_batches])

    def whole(self) -> Schedule:
        """Return a Schedule whose model is complete (all stages), made of fake tensors and changed like this model."""
        return fake_schedule(self.schedule, self.cls, ("cut_pipeline_stage",))[1]

    def holds(self, path: str) -> bool:
        """Return whether this rank runs the module at `path`: its stages hold the module, or all stages run it."""
        model = self.schedule.model
        units = [u for u in self.units if path == u or path.startswith(u + ".")]
        return not any(isinstance(model.get_submodule(unit), Foreign) for unit in units)

    def _dtype(self) -> torch.dtype:
        """Return the current dtype of the parameters, which the user may have cast since the last step."""
        return hf.dtype_of(self.schedule.model)

    def prepare(self) -> tuple[Any, Any]:
        """Return (FakeTensorMode, Schedule of a fake model of all stages), cached until the weights' dtype changes."""
        dtype = self._dtype()
        if self._fake is None or self._fake[0] != dtype:
            key = program_of(self.schedule, self.cls, self.units, CHANGE_NO_SHAPE), dtype
            with _turn:  # ranks that are threads share it: half the time of their load
                fake = _fakes.get(key) or fake_schedule(self.schedule, self.cls)[1]
                if key[0] is not None:
                    _fakes[key] = fake
            self._fake = dtype, (next(fake.model.parameters()).fake_mode, fake)  # type: ignore[attr-defined]
        return self._fake[1]


def fake_schedule(
    schedule: Schedule, cls: Any, leave_out: Collection[str] = CHANGE_NO_SHAPE, stream: Any = None
) -> tuple[Any, Schedule]:
    """Return (FakeTensorMode, new Schedule of a fake model with all stages' modules, changed as in `schedule`).

    Args:
        schedule: this rank's model, its mesh and the recorded changes to its modules; it is not modified.
        cls: class of the model.
        leave_out: names of the kinds of change, e.g. "checkpoint", that are left out, because they change no shape.
        stream: random stream, which makes dropout masks, for the fake model; None makes a new one.
    """
    model, mesh = schedule.model, schedule.mesh
    dtype = schedule.state.compute_dtype or hf.dtype_of(model)
    mode, fake = hf.build_fake(cls, model.config, dtype)
    in_dry_run = replace(mesh, dry_run=True)
    steps = [step for step in schedule.history if step[1].name not in leave_out]
    with mode:
        found = Schedule(fake, in_dry_run)
        found.state.random = stream or found.state.random
        found.replay(steps)
        if positions := schedule.state.positions:  # cp > 1
            follow_places(found.state.modules, found.state.random, positions)
            if (body := schedule.state.body) is not None:
                shard = example_shard(fake, positions)
                found.state.body = body.like(fake, found.state.random, shard)
        return mode, found


def _signature(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


class StageModule(nn.Module):
    """Module that torch.distributed.pipelining calls for one micro-batch of one stage.

    Args:
        pipeline: pipeline of this rank.
        plan: which blocks, embeddings and heads the stage calls, and what it receives, for a micro-batch's shapes.
        run: (micro-batch, global indices of its rows) --> its loss, a scalar, through the model's own forward.
        others: arguments that are not split into micro-batches.
        device: device of the received tensors.
    """

    def __init__(
        self, pipeline: Pipeline, plan: StagePlan, run: Callable[..., Any], others: dict,
        device: torch.device,
    ):  # fmt: skip
        super().__init__()
        self.device = device
        self._modules["model"] = pipeline.schedule.model
        self.cursor, self.plan, self.run, self.others = pipeline.cursor, plan, run, others

    def forward(self, *received: Tensor, **batch: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage, or on the last stage the micro-batch's loss, shape [1]. `received` are
        the tensors from the stage before, `batch` is the micro-batch, with its global row indices as `_global_rows`.
        """
        rows = batch.pop(ROWS)
        self.cursor.begin(self.plan, received, self.device)
        try:
            return (self.run({**batch, **self.others}, rows).reshape(1),)
        except StageDone:
            return self.cursor.outgoing()
        finally:
            self.cursor.end()


def split_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a batch into (tensors with a batch axis, everything else).

    A tensor with one row (`position_ids` [1, S]), where `input_ids` or `pixel_values` has several, applies to all
    rows and goes to the second dict.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim}
    main = next((tensors[name] for name in MAIN_INPUTS if name in tensors), None)
    if main is not None and len(main) != 1:
        tensors = {k: v for k, v in tensors.items() if len(v) != 1 or k in MAIN_INPUTS}
    return tensors, {k: v for k, v in batch.items() if k not in tensors}


def pipeline_step(
    pipeline: Pipeline,
    run: Callable[..., Any],
    tensors: dict[str, Tensor],
    others: dict[str, Any],
    micro_batches: int,
    before_last: Callable[[Any], None] | None = None,
) -> Tensor:
    """Run the forward and backward of all micro-batches of a step over all stages; gradients are added to `.grad`.

    Each step makes new stage objects, because torch's `PipelineStage` fixes its shapes in its first step.

    Args:
        pipeline: pipeline of this rank.
        run: (micro-batch, global indices of its rows) --> the scalar that its backward starts from.
        tensors: arguments [B, ...] that are split along axis 0.
        others: arguments that every micro-batch gets unsplit.
        micro_batches: number of micro-batches.
        before_last: called with a stage's outputs (tensors) before its last backward, during which data parallelism
            may all-reduce gradients; None calls nothing.

    Returns:
        The sum of what `run` returned for the micro-batches, detached, on the rank of the last stage; 0 elsewhere.
    """
    from slapo_zoo.pipeline.stage import quiet_schedules

    pipeline.places.check_micro_batches(micro_batches)
    cut = {k: v.tensor_split(micro_batches) for k, v in tensors.items() if _is_input(k)}
    whole = {k: v for k, v in others.items() if _is_input(k)}
    parts = [{**{k: v[i] for k, v in cut.items()}, **whole} for i in range(micro_batches)]
    plans = pipeline.plans_of_all(parts)
    device = next(iter(tensors.values())).device
    stages = [_stage(pipeline, p, run, others, device, before_last) for p in plans.values()]
    schedule = pipeline.places.runtime(stages, micro_batches, loss_fn=_sum, scale_grads=False)
    sends = pipeline.sends(micro_batches)
    for stage in stages:
        stage.sends, stage.has_met = sends, pipeline.has_met
    losses: list[Tensor] = []
    ends: dict[str, Any] = {}
    if pipeline.places.num_stages - 1 in plans:
        ends = {"target": torch.zeros(micro_batches, device=device), "losses": losses}
    with quiet_schedules(), pipeline.busy.step() if pipeline.busy else nullcontext():
        schedule.step(**ends, **tensors)
    sends.finish()
    pipeline.has_met = True
    return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)


def _is_input(name: str) -> bool:
    return name != ROWS and not name.startswith(FOR_LOSS)


def _stage(
    pipeline: Pipeline, plan: StagePlan, run: Callable, others: dict, device: torch.device,
    before_last: Callable[[Any], None] | None,
) -> Any:  # fmt: skip
    """Return torch's object for one stage. `plan` has its calls and tensor shapes, `run` maps (micro-batch, indices of
    its rows) to its loss, `others` are unsplit arguments. `before_last(stage's outputs)` runs before its last backward.
    """
    from slapo_zoo.pipeline.stage import Stage

    places, index = pipeline.places, plan.stage
    scalar = torch.empty(1, device="meta", requires_grad=True)
    once = recomputed_units(plan.units, pipeline.schedule.state.checkpointed)
    return Stage(
        StageModule(pipeline, plan, run, others, device), index, places.num_stages, device,
        input_args=_examples(plan, index),
        output_args=_examples(plan, index + 1) if index + 1 < places.num_stages else (scalar,),
        group=pipeline.schedule.mesh.group("pp"), units=plan.extent, spans=pipeline.spans, clock=pipeline.clock,
        dw_builder=(lambda: lambda: None) if once else None, busy=pipeline.busy, before_last=before_last,
    )  # fmt: skip


def recomputed_units(units: Sequence[str], checkpointed: Sequence[str]) -> set[str]:
    """Return the paths in `units` of modules that are, contain or lie inside a recomputed one (`checkpointed`: paths).

    A stage that runs one of them computes input and weight gradients in one backward: two would each recompute.
    """
    paths = [f"{path}." for path in checkpointed]
    return {unit for unit in units
            if any(path.startswith(f"{unit}.") or f"{unit}.".startswith(path) for path in paths)}  # fmt: skip


def _examples(plan: StagePlan, stage: int) -> tuple[Tensor, ...]:
    """Return the tensors that `stage` receives, in order, on meta: given these, torch exchanges no shapes in a step."""
    return tuple(plan.shape(value).empty("meta") for value in plan.crossing(stage))


def _sum(output: Any, target: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return output.sum()


def pipeline_forward(pipeline: Pipeline, run: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """Run one forward of the whole batch (no micro-batches) through all stages without gradients; return the model's
    output on every rank. `run` maps `batch` to the output by the model's own forward.
    """
    mesh, places = pipeline.schedule.mesh, pipeline.places
    tensors, _ = split_batch(batch)
    if not tensors:
        hint = "pass the model's inputs as tensors, e.g. input_ids"
        raise SlapoError("forward", "batch", "found no tensors", hint)
    device = next(iter(tensors.values())).device
    output, sent = None, ()
    with torch.no_grad():
        for stage, plan in pipeline.plans(batch).items():
            received = sent
            if stage and places.rank_of(stage - 1) != mesh.coord("pp"):
                received = _receive(pipeline, plan, device)
            output, sent = _run_stage(pipeline, plan, run, batch, received, device)
            if output is None and places.rank_of(stage + 1) != mesh.coord("pp"):
                for tensor in sent:
                    dist.send(tensor, mesh.at(pp=places.rank_of(stage + 1)), mesh.group("pp"))
    return share_output(pipeline, output, device)


def share_output(pipeline: Pipeline, output: Any, device: torch.device) -> Any:
    """Return on all pipeline ranks, on `device`, the `output` that the rank of the last stage has; others pass None."""
    mesh, places = pipeline.schedule.mesh, pipeline.places
    source = mesh.at(pp=places.rank_of(places.num_stages - 1))
    return broadcast_output(output, source, mesh.group("pp"), device)


def _receive(pipeline: Pipeline, plan: StagePlan, device: torch.device) -> tuple[Tensor, ...]:
    mesh, source = pipeline.schedule.mesh, pipeline.places.rank_of(plan.stage - 1)
    received = tuple(plan.shape(v).empty(device).detach() for v in plan.crossing(plan.stage))
    for tensor in received:
        dist.recv(tensor, mesh.at(pp=source), mesh.group("pp"))
    return received


def _run_stage(
    pipeline: Pipeline, plan: StagePlan, run: Callable, batch: Mapping[str, Any],
    received: tuple[Tensor, ...], device: torch.device,
) -> tuple[Any, tuple[Tensor, ...]]:  # fmt: skip
    """Run one stage on the tensors `received` from the stage before. Return (output, ()) on the last stage, else
    (None, tensors for the next stage). `run` maps a batch to the model's output.
    """
    cursor = pipeline.cursor
    cursor.begin(plan, received, device)
    try:
        return run(batch), ()
    except StageDone:
        return None, cursor.outgoing()
    finally:
        cursor.end()


def broadcast_output(output: Any, source: int, group: Any, device: torch.device) -> Any:
    """Return on all ranks of `group` the HuggingFace output of global rank `source`; caches are None on other ranks."""
    here = dist.get_rank() == source
    described: list[Any] = [tree_map(_described, output) if here else None]
    dist.broadcast_object_list(described, source, group=group, device=device)
    empty = lambda x: x if x is None else torch.empty_like(x, device=device)  # noqa: E731
    found = output if here else tree_map(empty, described[0])
    for x in tree_leaves(found):
        if isinstance(x, Tensor):
            dist.broadcast(x.detach().contiguous(), source, group=group)
    return found


def _described(x: Any) -> Tensor | None:
    """Return an empty meta tensor like the tensor `x`; None for other values (caches), which are not broadcast."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else None
