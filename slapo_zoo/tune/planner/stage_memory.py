"""Peak memory of each pipeline rank in a training step, part by part.

The maximum of three moments counts: the middle of a backward, when activations are alive and gradients
grow; the all-reduce over dp; and the optimizer step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slapo_zoo.parallel.gradient_buckets import BUCKET_BYTES
from slapo_zoo.tune.planner.hardware import Hardware
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.profile import Profile, Recompute, Unit
from slapo_zoo.tune.planner.runtime_kind import Precision, Runtime

PREFETCHED = 2  # blocks whose weights are gathered at the same time under ZeRO-3


@dataclass(frozen=True)
class StageMemory:
    """Memory of one pipeline stage for one micro-batch.

    Args:
        parameters: elements of all parameters of the stage, for weights, gradients and optimizer states.
        largest: elements of the largest parameter.
        widest: elements of all parameters of the largest block, which ZeRO-3 gathers at once.
        held: bytes of activations that a micro-batch keeps from its forward to its backward.
        peak: most bytes in use above `held` in a backward of a micro-batch after the first, when all gradients exist.
        growing: most bytes of activations and gradients together in the backward of the first micro-batch.
        received: bytes of tensors received from the previous stage.
        sent: bytes of tensors sent to the next stage.
        around: elements of the parameters outside the blocks.
        inner: `peak` of the blocks alone, without embedding and head, in bytes.
        first: elements of the parameters of the largest module before the blocks, tied parameters included.
        last: elements of the parameters of the largest module after the blocks.
        elsewhere: bytes of `received` that this rank drops until the backward: other tp ranks hold them ("sharded").
    """

    parameters: int
    largest: int
    widest: int
    held: float
    peak: float
    growing: float
    received: float
    sent: float = 0.0
    around: int = 0
    inner: float = 0.0
    first: int = 0
    last: int = 0
    elsewhere: float = 0.0


def stage_memory(
    profile: Profile, begin: int, end: int, rows: int, again: Recompute
) -> StageMemory:
    """Return the memory that a pipeline stage takes for a micro-batch of `rows` rows.

    The stage is made of the units (blocks, embeddings, heads) begin..end-1 of the profile; `again` says which of their
    activations are recomputed.
    """
    units, uses = profile.units[begin:end], profile.uses(rows)[begin:end]
    shared = [(size, names & {u.name for u in units}) for size, names in profile.shared]
    shared = [(size, names) for size, names in shared if names]
    own, waiting = [unit.parameters for unit in units], [0] * len(units)
    for size, names in shared:
        users = [i for i, unit in enumerate(units) if unit.name in names]
        own[users[-1]] += size  # the gradient appears when the last user's backward runs
        for i in range(users[0], users[-1]):  # autograd keeps it until the first user's backward
            waiting[i] += size
    held = [again.held(unit, use) for unit, use in zip(units, uses, strict=True)]
    sent = profile.uses(rows)[end].received if end < len(profile.units) else 0.0
    held[-1] -= min(held[-1], uses[-1].output, sent)  # freed when the next stage has it
    away = again.elsewhere(units, uses)
    for i, share in enumerate(away):
        at = i if uses[i].before >= share else i - 1  # the unit that made its input
        held[at] -= min(share, held[at]) * (at >= 0)
    below, above, peak, growing, inner = 0.0, float(sum(own)), 0.0, 0.0, 0.0
    each = zip(units, uses, held, own, waiting, away, strict=True)
    for unit, use, size, gradients, late, whole in each:
        above -= gradients
        most = max(use.backward_peak, use.forward_peak) + whole  # its input exists while it runs
        peak = max(peak, below + most + late)
        inner = max(inner, below + most + late) if unit.is_block else inner
        growing = max(growing, below + above + max(use.backward_growth, use.forward_peak) + whole)
        below += size
    largest = max([unit.largest for unit in units] + [size for size, _ in shared])
    received = uses[0].received if begin else 0.0
    blocks = [size for unit, size in zip(units, own, strict=True) if unit.is_block]
    sizes = sum(own), largest, max(blocks, default=0), sum(blocks)
    total, largest, widest, inside = (n // profile.itemsize for n in sizes)
    first, last = (n // profile.itemsize for n in _around(units, shared))
    return StageMemory(
        total, largest, widest, below, peak - below, growing, received, sent, total - inside,
        max(inner - below, 0.0), first, last, min(away[0], received) * (uses[0].before < away[0]),
    )  # fmt: skip


def _around(units: Sequence[Unit], shared: Sequence[tuple[int, frozenset[str]]]) -> tuple[int, int]:
    """Return (parameter bytes of the largest unit before a stage's first block, those of the largest after the last).

    `units` are the stage's blocks, embeddings and heads. `shared` has (bytes, names of units) of each tied parameter:
    if a unit before the blocks uses it, it counts as one more unit there; after the blocks no tied parameter counts.
    """
    at = [i for i, unit in enumerate(units) if unit.is_block] or [len(units)]
    early = {unit.name for unit in units[: at[0]]}
    tied = [size for size, names in shared if names & early]
    return (max([unit.parameters for unit in units[: at[0]]] + tied, default=0),
            max([unit.parameters for unit in units[at[-1] + 1 :]], default=0))  # fmt: skip


@dataclass(frozen=True)
class RankMemory:
    """Bytes of memory that one pipeline rank needs in a training step.

    Args:
        weights: parameters.
        gradients: gradients of all parameters.
        optimizer: states of AdamW.
        activations: activations that the micro-batches in flight keep.
        working: short-lived tensors at the peak.
        buffers: receive and send buffers of the micro-batches in flight, forward and backward.
        total: peak memory; at most the sum of the parts, whose own peaks may differ in time.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: float
    working: float
    buffers: float
    total: float


def rank_memory(
    stages: Sequence[StageMemory], in_flight: Sequence[float], layout: Layout, precision: Precision,
    runtime: Runtime, hardware: Hardware,
) -> RankMemory:  # fmt: skip
    """Return the peak memory of a pipeline rank with the stages `stages`, of which stages[i] has `in_flight[i]`
    micro-batches between forward and backward. `layout` has micro-batches and ZeRO settings, `precision` bytes per
    parameter. `runtime` (eager, ...) and `hardware` tell how the optimizer step runs, and so its temporary tensors.
    """
    m, largest = layout.micro_batches, max(stage.largest for stage in stages)
    count = sum(stage.parameters for stage in stages)
    around = sum(stage.around for stage in stages)
    weights, gradients, optimizer = _resident(count, around, layout, precision)
    activations = sum(n * stage.held for n, stage in zip(in_flight, stages, strict=True))
    # inputs live while their micro-batch does, and the next one is received while nothing is sent
    buffers = sum(
        min(n + (not stage.sent), m) * stage.received - n * stage.elsewhere + min(2, m) * stage.sent
        for n, stage in zip(in_flight, stages, strict=True)
    )
    whole = _gathered_bytes(max(stage.widest for stage in stages), layout, precision)
    summed = (precision.itemsize + precision.gradients) * (whole > 0)  # before the reduce-scatter
    late = max(stage.last for stage in stages) * summed
    working = max(max(max(stage.peak, stage.inner + whole) for stage in stages), late)
    fixed = weights + gradients + optimizer
    middle = fixed + buffers + activations + working
    if m == 1 and len(stages) == 1 and layout.dp_shard == 1:
        before = count * min(precision.gradients, precision.itemsize)  # counted in `growing` too
        middle = fixed - before + buffers + stages[0].growing
    bucket = min(gradients, max(BUCKET_BYTES, largest * precision.gradients))
    bucket *= layout.replicas > 1
    copies = hardware.optimizer_copies * largest * precision.state_itemsize
    if hardware.foreach and not runtime.fused_optimizer:  # temporaries of all parameters at once
        copies = count * precision.state_itemsize
    end = max(stage.first for stage in stages) * summed
    casts = weights * (precision.has_masters and runtime.casts)  # freed before the optimizer step
    step = fixed - casts + copies // layout.dp_shard
    total = max(middle, fixed + buffers + max(bucket, end), step)
    return RankMemory(weights, gradients, optimizer, activations, working, buffers, total)


def _resident(
    count: int, around: int, layout: Layout, precision: Precision
) -> tuple[int, int, int]:
    """Return (weight bytes, gradient bytes, bytes of optimizer states) of a rank with `count` parameters during a step.

    ZeRO shards the optimizer states, with the weights that they update, and from ZeRO-2 on the gradients. The weight
    bytes are then an unsharded copy to compute with: of all parameters, or under ZeRO-3 of the `around` outside blocks.
    """
    n, stage = layout.dp_shard, layout.zero_stage
    if n == 1:
        return count * precision.weights, count * precision.gradients, count * precision.optimizer
    whole = around if stage == 3 else count
    states = precision.optimizer + precision.weights * (not precision.has_masters)
    gradients = count * precision.gradients // (n if stage > 1 else 1)
    return whole * precision.weights, gradients, count * states // n


def _gathered_bytes(widest: int, layout: Layout, precision: Precision) -> int:
    """Return the bytes of unsharded weights and gradients that ZeRO-2 and ZeRO-3 hold for the blocks that are running;
    `widest` is the number of elements in the parameters of the largest block.
    """
    if layout.dp_shard == 1 or layout.zero_stage == 1:
        return 0
    weights = precision.weights * (layout.zero_stage == 3)
    return PREFETCHED * widest * (weights + precision.gradients)
