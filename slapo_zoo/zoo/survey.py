"""Survey of a scheduled model: shapes, bytes and collectives of every rank, without weights or processes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slapo_zoo.hf.cut_body import sharding
from slapo_zoo.hf.example_inputs import cut_example, example_batch
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.language.explain import Explanation, TrafficRow, after_backward
from slapo_zoo.language.tape import Tape, Transfer
from slapo_zoo.parallel.rank_plan import TIED
from slapo_zoo.pipeline.dataflow import Call, calls_of
from slapo_zoo.pipeline.dry_run import refused
from slapo_zoo.pipeline.pipeline_runtime import fake_schedule
from slapo_zoo.pipeline.stages import StagePlan, stages_of
from slapo_zoo.zoo.outline import Outline


@dataclass(frozen=True)
class RankSize:
    """Number and bytes of parameters per rank of pipeline stage `stage` and tp coordinate `tp_coord`, without ZeRO."""

    stage: int
    tp_coord: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Survey:
    """Shapes, parameter counts and collectives of a scheduled model on every rank.

    Args:
        outline: the scheduled model on the meta device.
        shapes: name of a tensor --> (unsharded shape, shape on each tp rank, stages that hold it).
        ranks: one entry per (stage, tp coordinate).
        total_parameters: number of parameters of the whole model; tied ones count once.
        traffic: collectives and transfers between stages in a step of one micro-batch.
    """

    outline: Outline
    shapes: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]], list[int]]]
    ranks: list[RankSize]
    total_parameters: int
    traffic: list[TrafficRow]


def survey(outline: Outline, batch_size: int, seq_len: int) -> Survey:
    """Return shapes, parameters and collectives of every rank of a mesh for a scheduled model on meta, `outline`.

    `outline` may be of any rank. The collectives are those for a micro-batch of `batch_size` rows of `seq_len` tokens.
    """
    mesh = outline.mesh
    parameters = {name for name, _ in outline.skeleton.named_parameters()}
    shapes = {}
    for spec in outline.specs:
        local = [spec.local_shape(mesh.tp, r) for r in range(mesh.tp)]
        shapes[spec.name] = (spec.shape, local, list(spec.stages))
    sizes = rank_sizes(outline)
    total = sum(math.prod(spec.shape) for spec in outline.specs if spec.name in parameters)
    found = _traffic(outline, example_batch(outline.model, batch_size, seq_len))
    return Survey(outline, shapes, sizes, total, found)


def rank_sizes(outline: Outline) -> list[RankSize]:
    """Return number and bytes of parameters per (stage, tp coordinate); a tensor on several stages counts on each."""
    mesh = outline.mesh
    parameters = {name for name, _ in outline.skeleton.named_parameters()}
    sizes = {(stage, r): [0, 0] for stage in range(mesh.pp) for r in range(mesh.tp)}
    for spec in outline.specs:
        for stage in spec.stages if spec.name in parameters else ():
            for r in range(mesh.tp):
                count = math.prod(spec.local_shape(mesh.tp, r))
                sizes[stage, r][0] += count
                sizes[stage, r][1] += count * getattr(torch, spec.dtype).itemsize
    return [RankSize(stage, r, *numbers) for (stage, r), numbers in sizes.items()]


def _traffic(outline: Outline, batch: Mapping[str, Tensor]) -> list[TrafficRow]:
    """Run one training step on fake tensors shaped like `batch`; return its collectives and transfers between stages."""
    mesh, dtype = outline.mesh, next(outline.model.parameters()).dtype
    mode, schedule = fake_schedule(outline.schedule, outline.cls)
    fake = schedule.model
    tape, positions = Tape(fake, outline.units), outline.state.positions
    schedule.state.forward = ForwardContext(outline.state.sequence_parallel, tape=tape)
    floats = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    cut = tape.cut_of(schedule.mesh, outline.state.cp_attention) if positions else None
    if cut and not schedule.state.body:
        floats = cut_example(fake, floats, cut.n, positions)
    with refused(fake), sharding(schedule.state, cut):
        tape.run(fake, mode, floats, tape.sum_of)
    found = [*tape.transfers, *_between_stages(outline, calls_of(tape.rows))]
    for stage in range(mesh.pp):
        held = [
            (n, p) for n, p in fake.named_parameters() if stage in stages_of(n, outline.holders)
        ]
        found += after_backward(outline.plan, held, schedule.state.sequence_parallel)
    return Explanation({}, found).totals()


def _between_stages(outline: Outline, calls: list[Call]) -> Iterator[Transfer]:
    """Yield a Transfer (send or all_reduce, "pp", phase, bytes) for each tensor that stages exchange in a step of one
    micro-batch, over all stages: activations, their gradients, gradients of tied weights. `calls`: calls of modules.
    """
    plan = StagePlan.make(calls, outline.state.cuts, 0)
    for stage in range(1, outline.places.num_stages):
        for shape in map(plan.shape, plan.crossing(stage)):
            size = math.prod(shape.shape) * shape.dtype.itemsize
            yield Transfer("send", "pp", "forward", size)
            if shape.requires_grad:
                yield Transfer("send", "pp", "backward", size)
    parameters = dict(outline.model.named_parameters(remove_duplicate=False))
    for row in outline.plan.saved:
        if row.sums(True, TIED):
            yield Transfer("all_reduce", "pp", "after backward", parameters[row.name].nbytes)
