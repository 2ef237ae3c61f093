"""Record the timeline of a real training step on all ranks of a pipeline."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from slapo_zoo.errors import MeshError
from slapo_zoo.pipeline.timeline import Span


def record_step(
    model: Any, batch: Mapping[str, Any], micro_batches: int | None = None
) -> list[Span]:
    """Run one `train_step`; return the timed actions of this rank's whole pipeline (all pp ranks), sorted by begin.

    Args:
        model: scheduled model with pp > 1; gradients are added to `.grad`.
        batch: batch of `train_step`.
        micro_batches: number of micro-batches of `train_step`.

    Raises:
        MeshError: the model has no pipeline.
    """
    pipeline = model._slapo.pipeline
    if pipeline is None:
        hint = "load the model with pp=2 or more"
        raise MeshError("record_step", "pp=1", "this model has no pipeline", hint)
    group = model.mesh.group("pp")
    dist.barrier(group)
    pipeline.spans = []
    try:
        model.train_step(batch, micro_batches)
        each: list[Any] = [None] * model.mesh.pp
        dist.all_gather_object(each, pipeline.spans, group=group)
    finally:
        pipeline.spans = None
    return sorted((span for spans in each for span in spans), key=lambda span: span.begin)
