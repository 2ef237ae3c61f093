"""The most memory that each pipeline rank needs in a training step, part by part.

Three moments are looked at: the middle of a backward, when activations are alive and gradients grow; the
sums over dp; the optimizer's step. The largest counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slapo_zoo.language.gradients import BUCKET_BYTES
from slapo_zoo.tune.planner.profile import Profile, Unit
from slapo_zoo.tune.planner.use import Use

ADAM_STATES = 2  # tensors as large as the parameter, in its dtype, as torch's AdamW keeps them


@dataclass(frozen=True)
class Recompute:
    """Which blocks are recomputed.

    Args:
        blocks: their names.
        policy: what they keep: "" nothing, "save_matmuls" the results of matrix products.
    """

    blocks: frozenset[str] = frozenset()
    policy: str = ""

    def held(self, unit: Unit, use: Use) -> float:
        """Bytes that a unit keeps from its forward to its backward."""
        if unit.name not in self.blocks:
            return use.kept
        return min(use.kept, use.output + (use.matmuls if self.policy else 0.0))


@dataclass(frozen=True)
class StageMemory:
    """One stage for one micro-batch, in bytes.

    Args:
        parameters: its weights.
        largest: the largest of them.
        held: what a micro-batch keeps from its forward to its backward.
        peak: most alive above that, in a backward, when all gradients are there.
        growing: most activations and gradients together in a first backward.
        received: what enters with a micro-batch.
        sent: what leaves with one.
    """

    parameters: int
    largest: int
    held: float
    peak: float
    growing: float
    received: float
    sent: float = 0.0


def stage_memory(
    profile: Profile, begin: int, end: int, rows: int, again: Recompute
) -> StageMemory:
    """Of the units begin..end of a profile, as one stage."""
    units, uses = profile.units[begin:end], profile.uses(rows)[begin:end]
    shared = [(size, names & {u.name for u in units}) for size, names in profile.shared]
    shared = [(size, names) for size, names in shared if names]
    own, waiting = [unit.parameters for unit in units], [0] * len(units)
    for size, names in shared:
        users = [i for i, unit in enumerate(units) if unit.name in names]
        own[users[-1]] += size  # the gradient is made by the unit that runs last
        for i in range(users[0], users[-1]):  # autograd holds it back until its first user has run
            waiting[i] += size
    held = [again.held(unit, use) for unit, use in zip(units, uses, strict=True)]
    below, above, peak, growing = 0.0, float(sum(own)), 0.0, 0.0
    for use, size, gradients, late in zip(uses, held, own, waiting, strict=True):
        above -= gradients
        most = max(use.backward_peak, use.forward_peak)
        peak = max(peak, below + most + late)
        growing = max(growing, below + above + max(use.backward_growth, use.forward_peak))
        below += size
    largest = max([unit.largest for unit in units] + [size for size, _ in shared])
    received = uses[0].received if begin else 0.0
    sent = profile.uses(rows)[end].received if end < len(profile.units) else 0.0
    peak -= below
    return StageMemory(sum(own), largest, below, peak, growing, received, sent)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of a pipeline.

    Args:
        weights: parameters.
        gradients: one per parameter.
        optimizer: states of AdamW.
        activations: what its micro-batches in flight keep.
        working: short-lived tensors at the fullest moment.
        buffers: what it receives for all micro-batches, forward and backward.
        total: at the fullest moment; the parts need not all be at their most then.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: float
    working: float
    buffers: float
    total: float


def rank_memory(
    stages: Sequence[StageMemory], in_flight: Sequence[float], micro_batches: int, dp: int,
    optimizer_copies: float = 2.0,
) -> RankMemory:  # fmt: skip
    """Of a rank that holds some stages.

    Args:
        stages: that it holds.
        in_flight: micro-batches that each holds at the fullest moment, the running one included.
        micro_batches: of a step.
        dp: copies of the model.
        optimizer_copies: temporaries of the optimizer, in units of the largest parameter.
    """
    weights = sum(stage.parameters for stage in stages)
    activations = sum(n * stage.held for n, stage in zip(in_flight, stages, strict=True))
    buffers = micro_batches * sum(stage.received + stage.sent for stage in stages)
    working = max(max(stage.peak for stage in stages), 0.0)
    fixed = (1 + ADAM_STATES) * weights
    if micro_batches == 1 and len(stages) == 1:
        middle = fixed + buffers + stages[0].growing
    else:
        middle = fixed + weights + buffers + activations + working
    bucket = 0 if dp == 1 else min(weights, max(BUCKET_BYTES, max(s.largest for s in stages)))
    after = fixed + weights + buffers + bucket
    step = fixed + weights + optimizer_copies * max(stage.largest for stage in stages)
    total = max(middle, after, step)
    return RankMemory(weights, weights, ADAM_STATES * weights, activations, working, buffers, total)
