"""The pipeline runtime: one step, or one forward, over the stages of a mesh."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.errors import ScheduleError, SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.pipeline.busy import Busy
from slapo_zoo.pipeline.dry_run import dry_run
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.pipeline.stages import Cursor, Foreign, StageDone, StagePlan
from slapo_zoo.pipeline.timeline import Span

ROWS = "_global_rows"  # of a micro-batch, cut beside its tensors; on the CPU, where the host reads them
MAIN_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_features",
)  # their rows are those of the batch
CHANGE_NO_SHAPE = ("cut_pipeline_stage", "checkpoint", "fork_rng")
FOR_LOSS = "_for_loss:"  # begins the names of what only a loss of one's own is given


class Pipeline:
    """The stages of one model, and their plans for each shape of batch.

    Args:
        schedule: of the whole model.
        cls: the model's own class.
        units: what a stage holds as a whole.
        cursor: of this rank's stages.
        places: which rank holds which stage, and the order in which they run.
    """

    def __init__(
        self, schedule: Schedule, cls: Any, units: list[str], cursor: Cursor, places: StageMap
    ):
        self.schedule, self.cls, self.units, self.cursor = schedule, cls, units, cursor
        self.places = places
        self.mine = places.stages_of(schedule.mesh.coord("pp"))
        self._plans: dict[Any, dict[int, StagePlan]] = {}
        self.looks = False  # at its data: a plan holds for one batch
        self._arrivals: dict[int, Any] = {}
        self._fake: Any = None
        self.spans: list[Span] | None = None
        self.busy: Busy | None = None
        self.clock: Callable[[], float] = time.monotonic  # one that processes share

    def __getstate__(self) -> dict[str, Any]:
        """Copy the pipeline without its plans: a copy makes its own dry runs."""
        return {**self.__dict__, "_plans": {}, "_fake": None, "busy": None}

    def plans(self, batch: Mapping[str, Any]) -> dict[int, StagePlan]:
        """Return the plan of each of this rank's stages for batches of these shapes; one dry run per shape."""
        divided = self.schedule.state.forward.tokens_divided
        key = (divided, self._dtype(), *sorted((k, _signature(v)) for k, v in batch.items()))
        if self.looks or key not in self._plans:
            with torch.inference_mode(False):  # what an evaluation makes, a step uses
                mode, fake = self.prepare()
                fake.state.forward = ForwardContext(divided)
                calls, looked = dry_run(fake.model, self.units, mode, batch)
            self.looks = self.looks or looked
            cuts = self.schedule.state.cuts
            self._plans[key] = {stage: StagePlan.make(calls, cuts, stage) for stage in self.mine}
        return self._plans[key]

    def plans_of_all(self, parts: Sequence[Mapping[str, Any]]) -> dict[int, StagePlan]:
        """The plans of the first micro-batch, which all others share.

        Raises:
            ScheduleError: where the forward looks at data, another one is cut in another way.
        """
        plans = self.plans(parts[0])
        if self.looks and any(self.plans(part) != plans for part in parts[1:]):
            problem = "what crosses a cut depends on the data, and differs between micro-batches"
            raise ScheduleError(
                "pipeline", "micro_batches", problem, "use pp=1, or one micro-batch"
            )
        return plans

    def sends(self, micro_batches: int) -> Any:
        """Return the tracker of this rank's sends in a step, or None where the runtime waits for each send."""
        from slapo_zoo.pipeline.in_flight import Sends, arrivals

        if self.places.waits_for_sends:
            return None
        if micro_batches not in self._arrivals:
            ranks = self.places.actions(micro_batches)
            rank = self.schedule.mesh.coord("pp")
            self._arrivals[micro_batches] = arrivals(ranks, self.places.rank_of, rank)
        return Sends(self._arrivals[micro_batches])

    def whole(self) -> Schedule:
        """The schedule with its recomputation, on the whole model made of fake tensors."""
        return fake_schedule(self.schedule, self.cls, ("cut_pipeline_stage",))[1]

    def holds(self, path: str) -> bool:
        """Return whether the module at a path runs on this rank."""
        model = self.schedule.model
        units = [u for u in self.units if path == u or path.startswith(u + ".")]
        return not any(isinstance(model.get_submodule(unit), Foreign) for unit in units)

    def _dtype(self) -> torch.dtype:
        """Return the dtype of the parameters as they are now: a model may be cast between steps."""
        return hf.dtype_of(self.schedule.model)

    def prepare(self) -> tuple[Any, Any]:
        """Make the fake model of a dry run; once per dtype."""
        dtype = self._dtype()
        if self._fake is None or self._fake[0] != dtype:
            self._fake = dtype, fake_schedule(self.schedule, self.cls)
        return self._fake[1]


def fake_schedule(
    schedule: Schedule, cls: Any, leave_out: Collection[str] = CHANGE_NO_SHAPE, stream: Any = None
) -> tuple[Any, Schedule]:
    """The whole scheduled model made of fake tensors, and their mode; its weights take no memory.

    Args:
        schedule: of any rank.
        cls: of the model.
        leave_out: primitives that a dry run can do without.
        stream: stands for the random stream, unless None.
    """
    model, mesh = schedule.model, schedule.mesh
    dtype = schedule.state.compute_dtype or hf.dtype_of(model)
    mode, fake = hf.build_fake(cls, model.config, dtype)
    in_dry_run = replace(mesh, dry_run=True)
    steps = [step for step in schedule.history if step[1].name not in leave_out]
    with mode:
        found = Schedule(fake, in_dry_run)
        found.state.random = stream or found.state.random
        return mode, found.replay(steps)


def _signature(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


class StageModule(nn.Module):
    """Module that `torch.distributed.pipelining` calls for one micro-batch of one stage.

    Args:
        pipeline: the stages.
        plan: for the shape of a micro-batch.
        run: (batch, rows) --> loss, by the model's own forward.
        others: arguments that are not divided into micro-batches.
        device: of what a stage receives.
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
        """Return the tensors that the next stage needs, or the loss [1]."""
        rows = batch.pop(ROWS)
        self.cursor.begin(self.plan, received, self.device)
        try:
            return (self.run({**batch, **self.others}, rows).reshape(1),)
        except StageDone:
            return self.cursor.outgoing()
        finally:
            self.cursor.end()


def split_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a batch into the tensors that have a batch axis, and everything else.

    One row beside a main input of several (`position_ids` [1, S]) stands for all of them: it stays whole.
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
    """Forward and backward of all micro-batches; gradients are added to `.grad`.

    The stage objects are made anew: `PipelineStage` freezes its shapes at its first step.
    `before_last` gets a stage's outputs before its last backward: an engine's sum may begin there.

    Returns:
        the sum of the micro-batch losses on the rank of the last stage, 0 elsewhere.
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
        stage.sends, stage.in_turn = sends, pipeline.places.order.name == "1F1B"
    losses: list[Tensor] = []
    ends: dict[str, Any] = {}
    if pipeline.places.num_stages - 1 in plans:
        ends = {"target": torch.zeros(micro_batches, device=device), "losses": losses}
    with quiet_schedules(), pipeline.busy.step() if pipeline.busy else nullcontext():
        schedule.step(**ends, **tensors)
    if sends is not None:
        sends.finish()
    return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)


def _is_input(name: str) -> bool:
    return name != ROWS and not name.startswith(FOR_LOSS)


def _stage(
    pipeline: Pipeline, plan: StagePlan, run: Callable, others: dict, device: torch.device,
    before_last: Callable[[Any], None] | None,
) -> Any:  # fmt: skip
    """Make the stage object of torch.distributed.pipelining, with its shapes given."""
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
    """The units of which some or all activations are recomputed.

    A stage that has one runs its backward in one part. In two parts each would recompute, and the one
    of the weights once per group of them.
    """
    paths = [f"{path}." for path in checkpointed]
    return {unit for unit in units
            if any(path.startswith(f"{unit}.") or f"{unit}.".startswith(path) for path in paths)}  # fmt: skip


def _examples(plan: StagePlan, stage: int) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes that enter a stage."""
    return tuple(plan.shape(value).empty("meta") for value in plan.crossing(stage))


def _sum(output: Any, target: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return output.sum()


def pipeline_forward(pipeline: Pipeline, run: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """One forward without gradients, stage after stage; the output arrives on every rank."""
    mesh, places = pipeline.schedule.mesh, pipeline.places
    tensors, _ = split_batch(batch)
    if not tensors:
        raise SlapoError("forward", "batch", "found no tensors", "pass input_ids or the like")
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
    """The output of the last stage, on every rank of the pipeline."""
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
    """The model's output on the last stage, else what the next stage needs."""
    cursor = pipeline.cursor
    cursor.begin(plan, received, device)
    try:
        return run(batch), ()
    except StageDone:
        return None, cursor.outgoing()
    finally:
        cursor.end()


def broadcast_output(output: Any, source: int, group: Any, device: torch.device) -> Any:
    """A HuggingFace output object from one rank to its group: structure first, then tensors."""
    here = dist.get_rank() == source
    described: list[Any] = [_describe(output) if here else None]
    dist.broadcast_object_list(described, source, group=group, device=device)
    cls, shapes = described[0]
    values = {}
    for name, (shape, dtype) in shapes.items():
        values[name] = torch.empty(shape, dtype=dtype, device=device)
        if here:
            values[name].copy_(output[name])
        dist.broadcast(values[name], source, group=group)
    return output if here else cls(**values)


def _describe(output: Any) -> tuple[type, dict[str, Any]]:
    """Class, and shape and dtype of each tensor; caches and tuples of layers stay where they are."""
    tensors = {k: v for k, v in output.items() if isinstance(v, Tensor)}
    return type(output), {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()}
