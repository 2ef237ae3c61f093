"""A training step of one layout, stage by stage, as `slapo-zoo plan` prints it: a view of the planner's."""

import itertools
from dataclasses import dataclass

from slapo_zoo.tune.planner.layout import Layout, places_of
from slapo_zoo.tune.planner.layout_search import Forecasted, Planner


@dataclass(frozen=True)
class StageForecast:
    """Predicted time and activations of one pipeline stage.

    Args:
        rank: pp coordinate.
        extent: first and last unit.
        seconds: of forward and backward of a micro-batch.
        flops: of both on one tp rank, what is recomputed included.
        activations: bytes kept from the forward of a micro-batch to its backward.
        received: bytes that enter with a micro-batch.
    """

    rank: int
    extent: str
    seconds: float
    flops: float
    activations: float
    received: float


def forecast(planner: Planner, layout: Layout) -> tuple[Forecasted, list[StageForecast]]:
    """Forecast of a layout: its memory and time, and the stage that binds."""
    found, places = planner.forecast(layout), places_of(layout)
    names = [unit.name for unit in planner.profile(layout.tp, layout.sequence_parallel).units]
    edges = itertools.pairwise([0, *planner.cuts(layout.stages), len(names)])
    stages = []
    for i, ((a, b), (memory, time)) in enumerate(
        zip(edges, planner.stages_of(layout), strict=True)
    ):
        extent = names[a] if b == a + 1 else f"{names[a]} .. {names[b - 1]}"
        stages.append(
            StageForecast(
                places.rank_of(i), extent, time.seconds, time.flops, memory.held, memory.received
            )
        )
    return found, stages
