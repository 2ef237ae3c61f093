"""What a schedule means for every rank: shapes, bytes and collectives, without a weight or a process."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slapo_zoo import hf
from slapo_zoo.flow import rehearse
from slapo_zoo.mesh import Mesh
from slapo_zoo.outline import Outline
from slapo_zoo.pipeline import NOT_REHEARSED
from slapo_zoo.placement import TensorSpec
from slapo_zoo.schedule import Schedule
from slapo_zoo.stages import StagePlan, stages_of
from slapo_zoo.traffic import Transfer, transfers


@dataclass(frozen=True)
class RankSize:
    """What one rank of a stage holds."""

    stage: int
    tp_coord: int
    parameters: int
    bytes: int


class Traffic(NamedTuple):
    """Collectives of one kind in one step, of all stages of one tp rank."""

    kind: str
    mesh_dim: str
    phase: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Survey:
    """The outcome.

    Args:
        outline: of the schedule.
        shapes: tensor --> (whole shape, shape on each tp rank, the stages that hold it).
        ranks: one per stage and tp rank.
        total_parameters: of the whole model, tied ones once.
        traffic: of one forward and backward of one micro-batch.
    """

    outline: Outline
    shapes: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]], list[int]]]
    ranks: list[RankSize]
    total_parameters: int
    traffic: list[Traffic]


def survey(outline: Outline, batch_size: int, seq_len: int) -> Survey:
    """Look at every rank of the outline's mesh.

    Args:
        outline: of any rank.
        batch_size: rows of a micro-batch.
        seq_len: tokens of a row.
    """
    mesh, specs = outline.mesh, outline.specs
    parameters = {name for name, _ in outline.skeleton.named_parameters()}
    tied = {name: ranks for ranks, names in outline.tied_ranks for name in names}
    shapes = {}
    ranks = {(stage, r): [0, 0] for stage in range(mesh.pp) for r in range(mesh.tp)}
    for spec in specs:
        local = [spec.local_shape(mesh.tp, r) for r in range(mesh.tp)]
        held = sorted(tied.get(spec.name) or stages_of(spec.name, outline.holders))
        shapes[spec.name] = (spec.shape, local, held)
        for stage in held if spec.name in parameters else ():
            for r, shape in enumerate(local):
                ranks[stage, r][0] += math.prod(shape)
                ranks[stage, r][1] += math.prod(shape) * _itemsize(spec)
    sizes = [RankSize(stage, r, *numbers) for (stage, r), numbers in ranks.items()]
    total = sum(math.prod(spec.shape) for spec in specs if spec.name in parameters)
    found = _traffic(outline, example_batch(outline.model, batch_size, seq_len))
    most = max(size.bytes for size in sizes)
    if mesh.dp > 1:
        found.append(Traffic("all_reduce", "dp", "after backward", 1, most))
    return Survey(outline, shapes, sizes, total, found)


def _itemsize(spec: TensorSpec) -> int:
    return getattr(torch, spec.dtype).itemsize


def example_batch(model: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """An input of the model's kind: images for pixel_values, else tokens."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        return {"pixel_values": torch.zeros(batch_size, config.num_channels, size, size)}
    choices = (2,) if "MultipleChoice" in type(model).__name__ else ()
    ids = torch.zeros((batch_size, *choices, seq_len), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decodes = config.is_encoder_decoder and "Encoder" not in type(model).__name__
    return {**batch, "decoder_input_ids": ids} if decodes else batch


def _traffic(outline: Outline, batch: Mapping[str, Tensor]) -> list[Traffic]:
    """Run the schedule on fake tensors, and count what crosses ranks."""
    mesh, model = outline.mesh, outline.model
    dtype = next(model.parameters()).dtype
    mode, fake = hf.build_fake(outline.cls, model.config, dtype)
    rehearsing = Mesh(mesh.tp, mesh.pp, mesh.dp, mesh.rank, rehearsal=True)
    steps = [step for step in outline.schedule.history if step[1].name not in NOT_REHEARSED]
    with mode:
        schedule = Schedule(fake, rehearsing).replay(steps)
    schedule.state.tokens_divided = outline.state.sequence_parallel
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()

    def note(transfer: Transfer) -> None:
        counts[transfer[:3]] += 1
        sizes[transfer[:3]] += transfer.bytes

    floats = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with transfers(schedule, note):
        calls = rehearse(fake, outline.units, mode, floats)
    plan = StagePlan.make(calls, outline.state.cuts, 0)
    for stage in range(1, outline.places.num_stages):
        for shape in map(plan.shape, plan.crossing(stage)):
            size = math.prod(shape.shape) * shape.dtype.itemsize
            note(Transfer("send", "pp", "forward", size))
            if shape.requires_grad:
                note(Transfer("send", "pp", "backward", size))
    return [Traffic(*key, counts[key], sizes[key]) for key in sorted(counts)]
