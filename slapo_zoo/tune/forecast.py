"""What a training step will take on each rank: cost, memory and bubble, before anything runs.

The scheduled model runs once on fake tensors: operations and saved activations of every unit are
counted there, weights come from the placements, and the order is played through on paper.
"""

import math
from dataclasses import dataclass
from typing import Any

from slapo_zoo.pipeline.unit_costs import Counting, UnitCost, costs_of, usual_tokens
from slapo_zoo.hf.example_inputs import training_batch
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.pipeline.runtime import fake_schedule, recomputed_units
from slapo_zoo.pipeline.stages import StagePlan
from slapo_zoo.zoo.survey import rank_sizes
from slapo_zoo.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    Action,
    bubble,
    makespan,
    most_in_flight,
    simulate,
)

ADAM_STATES = 2  # tensors as large as the parameter, in its dtype, as torch's AdamW keeps them


@dataclass(frozen=True)
class StageForecast:
    """One stage.

    Args:
        rank: pp coordinate.
        extent: first and last unit.
        forward: operations of a micro-batch on one tp rank.
        backward_inputs: of the backward that other stages wait for; with what is recomputed.
        backward_weights: of the rest of the backward.
        activations: bytes kept from the forward of a micro-batch to its backward.
        received: bytes that enter with a micro-batch, and as many gradients that come back.
    """

    rank: int
    extent: str
    forward: float
    backward_inputs: float
    backward_weights: float
    activations: int
    received: int

    @property
    def step(self) -> float:
        """Operations of forward and backward of a micro-batch."""
        return self.forward + self.backward_inputs + self.backward_weights

    def cost(self, kind: str) -> float:
        """Operations of one action."""
        if kind == FORWARD:
            return self.forward
        whole = self.backward_inputs + self.backward_weights
        parts = {BACKWARD: whole, BACKWARD_INPUT: self.backward_inputs}
        return parts.get(kind, self.backward_weights)


@dataclass(frozen=True)
class RankForecast:
    """Bytes on one rank of a pipeline, the fullest of its tp peers.

    Args:
        rank: pp coordinate.
        weights: parameters.
        gradients: one per parameter.
        optimizer: states of AdamW.
        activations: most that its stages hold at a time in the order.
        buffers: what it receives for all micro-batches, forward and backward.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them; libraries, kernels' scratch memory and fragmentation come on top."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.buffers)
        return sum(parts)


@dataclass(frozen=True)
class Forecast:
    """A training step.

    Args:
        stages: all of them, in order.
        ranks: the pp coordinates.
        micro_batches: of a step.
        bubble: share of the ranks' time that the order leaves empty, transfers not counted.
        operations: that one rank could do in the time of a step; to compare configurations.
    """

    stages: list[StageForecast]
    ranks: list[RankForecast]
    micro_batches: int
    bubble: float
    operations: float


def forecast(
    outline: Outline, micro_batches: int, rows: int = 1, seq_len: int | None = None
) -> Forecast:
    """Forecast the training step of an outline.

    Args:
        outline: of any rank.
        micro_batches: of a step.
        rows: of a micro-batch.
        seq_len: tokens of a row.
    """
    places = outline.places
    stages = stage_forecasts(outline, rows, seq_len or usual_tokens(outline.model.config))
    order = places.actions(micro_batches) if places.pp > 1 else _alone(micro_batches)
    spans = simulate(order, lambda action: stages[action.stage].cost(action.kind))
    ranks = []
    for rank, actions in enumerate(order):
        mine = [stages[stage] for stage in places.stages_of(rank)]
        sizes = [size for size in rank_sizes(outline) if size.stage == rank]
        weights = max(size.bytes for size in sizes)
        kept = most_in_flight(actions, lambda stage: stages[stage].activations)
        buffers = 2 * micro_batches * sum(stage.received for stage in mine)
        ranks.append(
            RankForecast(rank, weights, weights, ADAM_STATES * weights, int(kept), buffers)
        )
    return Forecast(stages, ranks, micro_batches, bubble(spans), makespan(spans))


def _alone(micro_batches: int) -> list[list[Action]]:
    """Without a pipeline a micro-batch goes forward and back before the next."""
    return [[Action(0, kind, i) for i in range(micro_batches) for kind in (FORWARD, BACKWARD)]]


def stage_forecasts(outline: Outline, rows: int, seq_len: int) -> list[StageForecast]:
    """Cost and memory of every stage for a micro-batch of so many rows."""
    mode, schedule = fake_schedule(outline.schedule, outline.cls)
    schedule.state.tokens_divided = outline.state.sequence_parallel
    model: Any = schedule.model
    batch = training_batch(outline.model, rows, seq_len)
    dtype = next(model.parameters()).dtype
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    counting = Counting(model, outline.units)
    counting.run(mode, model, batch)
    costs = list(costs_of(counting, model, outline.units, rows * seq_len))
    again = recomputed_units(outline.units, outline.state.checkpointed)
    plan = StagePlan.make(counting.calls, outline.state.cuts, 0)
    found = []
    for stage in range(outline.places.num_stages):
        here = [c for c, at in zip(costs, plan.stage_of_call, strict=False) if at == stage]
        if stage + 1 == outline.places.num_stages:
            here += costs[len(plan.stage_of_call) :]  # units that the rehearsal did not reach
        received = sum(_bytes(plan.shape(value)) for value in plan.crossing(stage))
        found.append(_stage(outline.places.rank_of(stage), here, again, received))
    return found


def _stage(rank: int, here: list[UnitCost], again: set[str], received: int) -> StageForecast:
    extent = here[0].unit if len(here) == 1 else f"{here[0].unit} .. {here[-1].unit}"
    repeated = [cost for cost in here if cost.unit in again]
    kept = sum(cost.saved for cost in here if cost.unit not in again)
    # a recomputed unit keeps its input, and while it is recomputed all that it saves
    kept += sum(cost.output for cost in repeated) + max((c.saved for c in repeated), default=0)
    inputs = sum(cost.backward_inputs for cost in here) + sum(cost.forward for cost in repeated)
    return StageForecast(
        rank, extent, sum(cost.forward for cost in here), inputs,
        sum(cost.backward_weights for cost in here), kept, received,
    )  # fmt: skip


def _bytes(shape: Any) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize
