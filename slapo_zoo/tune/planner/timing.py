"""How long a step takes: what each stage computes and moves, the order, and the collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

from slapo_zoo.tune.planner.hardware import Hardware
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.memory import Recompute
from slapo_zoo.tune.planner.profile import Profile

OPTIMIZER_PASSES = 7  # read weight, gradient and two states; write weight and two states


@dataclass(frozen=True)
class StageTime:
    """One stage for one micro-batch.

    Args:
        forward_s: seconds of the forward, tp collectives included.
        backward_s: of the backward, what is recomputed included.
        flops: of both on one rank, what is recomputed included.
        comm: bytes that it sends over tp.
        received: bytes that enter.
    """

    forward_s: float
    backward_s: float
    flops: float
    comm: float
    received: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StepTime:
    """A training step.

    Args:
        seconds: of it.
        bubble: share of the pipeline's time in which a rank waits.
        compute_s: of the busiest rank, tp collectives included.
        gradients_s: of the sums over dp.
        optimizer_s: of the optimizer's step.
        tp_bytes: that one rank sends over tp in a step.
        dp_bytes: over dp.
        pp_bytes: over pp.
        flops: of one step on the busiest rank.
    """

    seconds: float
    bubble: float
    compute_s: float
    gradients_s: float
    optimizer_s: float
    tp_bytes: float
    dp_bytes: float
    pp_bytes: float
    flops: float


def stage_time(
    profile: Profile, begin: int, end: int, rows: int, again: Recompute, tp: int, hardware: Hardware,
    dtype: str,
) -> StageTime:  # fmt: skip
    """Of the units begin..end of a profile, as one stage."""
    rate, width = hardware.flops(dtype), hardware.bandwidth
    forward = backward = flops = comm = 0.0
    for unit, use in zip(profile.units[begin:end], profile.uses(rows)[begin:end], strict=True):
        sent = use.forward_comm * (tp - 1) / tp, use.backward_comm * (tp - 1) / tp
        ahead = _seconds(
            use.forward_flops, use.forward_moved, use.forward_ops, rate, width, hardware
        )
        ahead += sent[0] / hardware.between(tp)
        back = _seconds(
            use.backward_flops, use.backward_moved, use.backward_ops, rate, width, hardware
        )
        back += sent[1] / hardware.between(tp)
        repeated = _repeated(use, again.policy) if unit.name in again.blocks else 0.0
        forward += ahead
        backward += back + repeated * ahead
        flops += use.forward_flops + use.backward_flops + (repeated == 1.0) * use.forward_flops
        comm += sum(sent) + repeated * sent[0]
    received = profile.uses(rows)[begin].received if begin else 0.0
    return StageTime(forward, backward, flops, comm, received)


def _seconds(
    flops: float, moved: float, ops: float, rate: float, width: float, hardware: Hardware
) -> float:
    return max(flops / rate + moved / width, ops * hardware.operation_s)


def _repeated(use: object, policy: str) -> float:
    """Share of the forward that runs again: without its matrix products about half is left."""
    return 0.5 if policy else 1.0


def step_time(
    stages: Sequence[StageTime], layout: Layout, weights: float, hardware: Hardware
) -> StepTime:
    """Of all stages in their order.

    Args:
        stages: of the whole pipeline; stage i is on rank i % pp.
        layout: the configuration.
        weights: bytes of the fullest rank.
        hardware: the cluster.
    """
    pp, m, laps = layout.pp, layout.micro_batches, layout.stages_per_rank
    per_rank = [sum(stages[r + pp * lap].seconds for lap in range(laps)) for r in range(pp)]
    busiest, whole = max(per_rank), sum(stage.seconds for stage in stages)
    wire = hardware.between(layout.tp * layout.dp * pp) if pp > 1 else hardware.link
    crossing = sum(2 * stage.received for stage in stages[1:])  # forward, and its gradient
    fill = (whole / laps if pp > 1 else busiest) - busiest / laps * (pp > 1)
    run = m * busiest + max(fill if pp > 1 else 0.0, 0.0) + crossing / wire
    dp = layout.dp
    dp_bytes = 2.0 * weights * (dp - 1) / dp
    gradients = dp_bytes / hardware.between(layout.tp * dp) + (dp > 1) * hardware.latency_s
    optimizer = OPTIMIZER_PASSES * weights / hardware.bandwidth
    bubble = 1.0 - m * sum(per_rank) / pp / run if run else 0.0
    here = max(range(pp), key=per_rank.__getitem__)
    mine = [stages[here + pp * lap] for lap in range(laps)]
    return StepTime(
        run + gradients + optimizer, bubble if pp > 1 else 0.0, m * busiest, gradients, optimizer,
        m * sum(s.comm for s in mine), dp_bytes, 2 * m * sum(s.received for s in mine),
        m * sum(s.flops for s in mine),
    )  # fmt: skip
