"""Forecast of one training step per pipeline stage, for the tables of `slapo-zoo plan`."""

import itertools
from dataclasses import dataclass

from slapo_zoo.tune.planner.layout import Layout, places_of
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.search_result import Forecasted


@dataclass(frozen=True)
class StageForecast:
    """Predicted time and activations of one pipeline stage.

    Args:
        rank: pp coordinate of the rank that runs the stage.
        extent: names of the first and the last unit of the stage.
        seconds: time of forward plus backward of one micro-batch.
        flops: floating-point operations of forward plus backward on one tp rank, recomputation included.
        activations: bytes kept from the forward of a micro-batch to its backward.
        received: bytes that the stage receives per micro-batch from the stage before.
    """

    rank: int
    extent: str
    seconds: float
    flops: float
    activations: float
    received: float


def forecast(planner: Planner, layout: Layout) -> tuple[Forecasted, list[StageForecast]]:
    """Return (memory and time of a training step under `layout`, the forecast of each pipeline stage)."""
    found, places = planner.forecast(layout), places_of(layout)
    names = [unit.name for unit in planner.profile_of(layout).units]
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
