"""Seconds of a matrix product, of a collective, of a pipeline stage and of a whole training step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from slapo_zoo.language.tape import Product
from slapo_zoo.parallel.gradient_buckets import BUCKET_BYTES
from slapo_zoo.pipeline.timeline import BACKWARD, FORWARD, makespan, simulate
from slapo_zoo.tune.planner.hardware import Hardware
from slapo_zoo.tune.planner.layout import CLOSED, Layout, places_of
from slapo_zoo.tune.planner.profile import Profile, Recompute, Use, Work
from slapo_zoo.tune.planner.runtime_kind import Precision, Runtime

STATE_PASSES = 2  # AdamW reads and writes its states, and a float32 copy
GRADIENT_PASSES = 3  # passes for the norm, for scaling, for the update
# (rows, columns, rate relative to the largest) of the tiles into which a GPU's library splits a product
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.85), (64, 256, 0.85),
         (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))  # fmt: skip
# rate of a fused attention relative to a large product, where operations that a causal one skips are counted
FUSED_ATTENTION = 0.6
UNSKIPPED = 0.5  # factor of that rate with cp: queries have a mask over all keys; none is skipped


def product_seconds(hardware: Hardware, dtype: str, product: Product) -> float:
    """Return the seconds of `product`, a batch of matrix products or a fused attention, in `dtype` ("bfloat16", ...):
    the larger of compute and memory time. On a GPU a product is split into tiles, one per multiprocessor at a time; to
    begin and end a tile takes as long as `hardware.fill` more elements along the summed axis.
    """
    rate, moved = hardware.flops(dtype), product.moved / hardware.bandwidth
    if not product.n:
        share = FUSED_ATTENTION * (UNSKIPPED if product.k > product.m else 1.0)
        return max(product.flops / (rate * share), moved)
    if not hardware.multiprocessors:
        return max(product.flops / rate, moved)
    return max(_tiled(*product[:4], hardware.multiprocessors, hardware.fill) / rate, moved)


@lru_cache(maxsize=1 << 16)
def _tiled(batch: float, m: float, n: float, k: float, count: int, fill: float) -> float:
    """Return the operations of `batch` products [m, k] x [k, n] in tiles of the best shape, `count` (multiprocessors)
    at a time. Partial tiles count as full, and fewer than `count` at the end as `count`; k counts as longer by `fill`.
    """
    return min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / count)
        * count * 2.0 * rows * columns * (k + fill) / share
        for rows, columns, share in TILES
    )  # fmt: skip


def group_rate(hardware: Hardware, ranks: int, stride: int = 1, cards: int | None = None) -> float:
    """Return the bytes per second that each device sends in a ring of `ranks` devices whose ranks are `stride` apart.

    Across nodes the ring uses all network cards of a node's ranks, at most `cards` (None: one per rank), as NCCL does.
    """
    if ranks * stride <= hardware.per_node:
        return hardware.link
    members = max(1, hardware.per_node // stride)
    return min(hardware.link, min(members, cards or members) * hardware.network)


def collective_seconds(
    hardware: Hardware, ranks: int, moved: float, count: float, stride: int = 1,
    cards: int | None = None,
) -> float:  # fmt: skip
    """Return the seconds of `count` collectives, one after the other, over a group of `ranks` devices.

    All of them together send `moved` * (ranks - 1) / ranks bytes per rank. Global ranks of neighbours in the group are
    `stride` apart. `cards` is the number of network cards per node that the group uses; None: one per rank of the node.
    """
    if ranks == 1:
        return 0.0
    nodes = max(1, ranks * stride // hardware.per_node)
    inside = ranks if nodes == 1 else max(1, hardware.per_node // stride)
    hops = inside + hardware.node_hops * math.log2(nodes)
    wait = hardware.latency_s + hardware.hop_s * hops
    return count * wait + moved * (ranks - 1) / ranks / group_rate(hardware, ranks, stride, cards)


def exchange_seconds(hardware: Hardware, ranks: int, moved: float, stride: int = 1) -> float:
    """Return the transfer seconds of all-to-alls over `ranks` devices, `stride` ranks apart, without their latency.
    `moved` is the bytes that a rank holds before; it keeps 1/`ranks` of them, and sends as much to each other rank,
    over a link within the node and over its network card beyond.
    """
    inside = min(ranks, max(1, hardware.per_node // stride))
    away = (ranks - inside) / ranks / hardware.network if ranks > inside else 0.0
    return moved * max((inside - 1) / ranks / hardware.link, away)


@dataclass(frozen=True)
class How:
    """Conditions that the seconds of a piece of work depend on: hardware, runtime, precision, tp and cp.

    Args:
        hardware: profile of the cluster.
        runtime: constants of the way to run the model (eager, compiled, ...), e.g. whether operations are fused.
        precision: dtype of products, and bytes of a weight, its gradient and its optimizer states.
        tp: ranks that shard each layer.
        cp: ranks that shard the tokens of each row.
    """

    hardware: Hardware
    runtime: Runtime
    precision: Precision
    tp: int = 1
    cp: int = 1

    def seconds(self, work: Work) -> float:
        """Return the seconds of a forward or backward of a block, embedding or head: the slower of device and host for
        its `work`, plus its collectives.
        """
        hardware, dtype = self.hardware, self.precision.dtype
        moved, launches = work.moved, work.ops
        if self.runtime.fused:
            moved, launches = work.fused, work.launches * self.runtime.host
        products = sum(product_seconds(hardware, dtype, product) for product in work.products)
        device = products + moved / hardware.bandwidth
        shared = collective_seconds(hardware, self.tp, work.comm, work.collectives)
        rings = work.cut_comm - work.exchanged
        shared += collective_seconds(hardware, self.cp, rings, work.cut_collectives, self.tp)
        shared += exchange_seconds(hardware, self.cp, work.exchanged, self.tp)
        return max(device, launches * hardware.operation_s) + shared

    def again(self, use: Use, policy: str) -> float:
        """Return the seconds that the activation policy `policy` adds to one call of a block, embedding or head of cost
        `use`: copies to the host ("offload") or recomputing ("recompute", "attention", "save_matmuls", "sharded").
        """
        if policy == "offload":
            copied = use.kept / self.hardware.host
            waits = (max(copied - self.seconds(w), 0.0) for w in (use.forward, use.backward))
            return sum(waits) + 2 * self.hardware.operation_s  # the host starts two copies
        if policy == "attention":
            return self.seconds(use.attention)
        if policy == "save_matmuls":
            return self.seconds(use.forward._replace(products=()))
        gathers = self.tp > 1 and policy == "sharded"
        input_s = collective_seconds(self.hardware, self.tp, use.output * gathers, gathers)
        return self.seconds(use.forward) + input_s


@dataclass(frozen=True)
class StageTime:
    """Predicted seconds of one pipeline stage for one micro-batch.

    Args:
        forward_s: seconds of the forward, collectives over tp and cp included.
        backward_s: seconds of the backward, recomputation included.
        flops: floating-point operations of forward plus backward on one rank, recomputation included.
        comm: bytes that a rank sends over tp.
        received: bytes received from the previous stage.
        units: number of blocks, embeddings and heads; ZeRO gathers and reduces each in a collective of its own.
        cut_comm: bytes that a rank sends over cp.
    """

    forward_s: float
    backward_s: float
    flops: float
    comm: float
    received: float
    units: int
    cut_comm: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of forward plus backward of a micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds and bytes sent of one training step.

    Args:
        seconds: time of the whole step.
        bubble: share of the pipeline's time in which a rank waits, 0 to 1.
        compute_s: seconds of compute on the busiest rank, collectives over tp and cp included.
        gradients_s: seconds of the gradient all-reduce over dp and cp.
        optimizer_s: seconds of the optimizer step.
        transfer_s: seconds that the busiest rank waits for tensors of its neighbours.
        tp_bytes: bytes that one rank sends over tp in a step.
        dp_bytes: bytes of gradients and, with ZeRO, weights that one rank sends over dp and cp.
        pp_bytes: bytes that one rank sends over pp.
        flops: operations of one step on the busiest rank.
        cp_bytes: bytes of keys, values and their gradients that one rank sends over cp.
    """

    seconds: float
    bubble: float
    compute_s: float
    gradients_s: float
    optimizer_s: float
    transfer_s: float
    tp_bytes: float
    dp_bytes: float
    pp_bytes: float
    flops: float
    cp_bytes: float = 0.0

    @property
    def bubble_share(self) -> float:
        """Return the share of the step in which the busiest rank waits for other stages, transfers not counted."""
        within = self.seconds - self.gradients_s - self.optimizer_s
        return max(self.bubble * within - self.transfer_s, 0.0) / self.seconds


def stage_time(
    profile: Profile, begin: int, end: int, rows: int, again: Recompute, how: How
) -> StageTime:
    """Return the time of a stage made of the units (blocks, embeddings, heads) begin..end-1 of a profile.

    `rows` is the rows of a micro-batch, `again` the recompute policies of the units, `how` the hardware,
    runtime, precision, tp and cp.
    """
    share = (how.tp - 1) / how.tp
    forward = backward = flops = comm = cut_comm = 0.0
    cache = profile.cache
    for unit, use in zip(profile.units[begin:end], profile.uses(rows)[begin:end], strict=True):
        policy = again.of(unit.name)
        key = id(use), id(how.hardware), policy
        if key not in cache:
            cache[key] = (
                how.seconds(use.forward),
                how.seconds(use.backward),
                how.again(use, policy) if policy != "keep" else 0.0,
            )
        ahead, back, repeated = cache[key]
        forward += ahead
        backward += back + repeated
        whole, gathered = policy in ("recompute", "sharded"), use.output * (policy == "sharded")
        flops += use.forward.flops * (1 + whole) + use.backward.flops
        comm += share * (use.forward.comm * (1 + whole) + use.backward.comm + gathered)
        cut_comm += use.forward.cut_comm * (1 + whole) + use.backward.cut_comm
    received = profile.uses(rows)[begin].received if begin else 0.0
    cut_comm *= (how.cp - 1) / how.cp
    return StageTime(forward, backward, flops, comm, received, end - begin, cut_comm)


def step_time(stages: Sequence[StageTime], layout: Layout, parameters: float, how: How) -> StepTime:
    """Return the time of a training step.

    Args:
        stages: times of all stages of the pipeline, in order.
        layout: sizes of the mesh, micro-batches, pipeline order and ZeRO.
        parameters: number of parameters on the fullest rank.
        how: hardware, runtime, precision, tp and cp.
    """
    m, precision, hardware = layout.micro_batches, how.precision, how.hardware
    wait = [_transfer(stage.received, layout, how) for stage in stages]
    run, mine, per_rank = _pipeline(stages, wait, layout)
    transfers = 2 * m * max(wait) * layout.stages_per_rank * (layout.pp > 1)
    # a micro-batch adds its gradients to those of earlier ones
    sums = (precision.weights + 2 * precision.gradients) * parameters / hardware.bandwidth
    run += 0.0 if how.runtime.accumulates else m * sums
    gradients, dp_bytes = _gradients(parameters, layout, how, run / m, mine)
    states = STATE_PASSES * (precision.weights + precision.optimizer)
    states += GRADIENT_PASSES * precision.gradients
    optimizer = states * parameters / layout.dp_shard / hardware.bandwidth
    bubble = 1.0 - m * sum(per_rank) / layout.pp / run if layout.pp > 1 else 0.0
    return StepTime(
        run + gradients + optimizer, bubble, m * max(per_rank), gradients, optimizer, transfers,
        m * sum(s.comm for s in mine), dp_bytes, 2 * m * sum(s.received for s in mine),
        m * sum(s.flops for s in mine), m * sum(s.cut_comm for s in mine),
    )  # fmt: skip


def _pipeline(
    stages: Sequence[StageTime], wait: Sequence[float], layout: Layout
) -> tuple[float, list[StageTime], list[float]]:
    """Return (seconds of all forwards and backwards of a step, stages of the rank with most compute, seconds of forward
    and backward of one micro-batch on each rank, without transfers). wait[i] is the seconds of a transfer to stage i.

    The first is a formula for 1F1B, interleaved 1F1B and GPipe: the work of the busiest rank, and the time to fill and
    drain the pipeline. Other orders are simulated action by action.
    """
    places, m = places_of(layout), layout.micro_batches
    held = [[stages[i] for i in places.stages_of(rank)] for rank in range(layout.pp)]
    per_rank = [sum(stage.seconds for stage in mine) for mine in held]
    here = max(range(layout.pp), key=per_rank.__getitem__)
    if layout.pp == 1:
        return m * per_rank[0], held[0], per_rank
    if layout.pipeline_order in CLOSED:
        if layout.stages_per_rank > 1 and m < layout.pp:
            # too few micro-batches to interleave: one passes all stages, each other follows a stage behind
            apart = per_rank[here] / layout.stages_per_rank + 2 * max(wait)
            return sum(per_rank) + 2 * sum(wait) + (m - 1) * apart, held[here], per_rank
        fill = (sum(per_rank) - per_rank[here]) / layout.stages_per_rank + 2 * sum(wait)
        # per micro-batch and stage a rank sends and receives an activation and a gradient
        steady = m * (per_rank[here] + 2 * max(wait) * layout.stages_per_rank)
        return steady + fill, held[here], per_rank
    cost = lambda action: _cost(stages[action.stage], action.kind)  # noqa: E731
    spans = simulate(places.actions(m), cost, max(wait))
    return makespan(spans), held[here], per_rank


def _cost(stage: StageTime, kind: str) -> float:
    """Return the seconds of one action of a pipeline stage; `kind` is "F" (forward), "B" (backward), "I" or "W".

    "I" and "W", the backward of inputs alone and that of weights alone, count as half a backward each.
    """
    if kind == FORWARD:
        return stage.forward_s
    return stage.backward_s * (1.0 if kind == BACKWARD else 0.5)


def _transfer(received: float, layout: Layout, how: How) -> float:
    """Return the seconds that a stage needs to receive `received` bytes from the stage before.

    `how` has the hardware and the runtime, `layout` the number of ranks.
    """
    if not received:
        return 0.0
    hardware = how.hardware
    sent = received / layout.tp if how.runtime.scatters else received
    apart = layout.tp * layout.replicas
    rate = group_rate(hardware, 2, apart)
    inside = hardware.per_node >= 2 * apart
    shared = received * (layout.tp - 1) / layout.tp / hardware.link * how.runtime.scatters
    return hardware.latency_s + sent / (rate if inside else hardware.network) + shared


def _gradients(
    parameters: float, layout: Layout, how: How, micro_batch_s: float, mine: Sequence[StageTime]
) -> tuple[float, float]:
    """Return (seconds that a step waits for the gradient all-reduce over dp and cp and for ZeRO's collectives, bytes
    that a rank sends in them).

    Only time that does not overlap with compute counts. Collectives of a micro-batch overlap with its compute.
    The all-reduce overlaps with the last backward, except for the last group of gradients that it sends.
    The rank has `parameters` parameters and the stages `mine`, and takes `micro_batch_s` seconds per micro-batch; `how`
    has hardware, runtime, precision, tp and cp.
    """
    precision, stage, shards = how.precision, layout.zero_stage, layout.dp_shard
    weights, gradients = parameters * precision.weights, parameters * precision.gradients
    hidden = (2 * weights * (stage == 3) + gradients * (stage > 1)) * (shards > 1)
    times = (2 * (stage == 3) + (stage > 1)) * sum(part.units for part in mine)
    once = (weights * (stage < 3) + gradients * (stage == 1)) * (shards > 1)

    def seconds(moved: float, ranks: int, stride: int) -> float:
        return collective_seconds(how.hardware, ranks, moved, moved > 0, stride)

    def of_parts(moved: float, count: float) -> float:
        return collective_seconds(how.hardware, shards, moved, count, layout.tp, cards=1)

    m, copies = layout.micro_batches, layout.replicas // shards
    found = m * max(0.0, of_parts(hidden, times) - micro_batch_s)
    found += of_parts(once, once > 0)
    sums = 2 * gradients / shards
    last = min(sums, 2.0 * BUCKET_BYTES)
    backward = sum(part.backward_s for part in mine) * how.runtime.overlapped
    behind = seconds(sums, copies, layout.tp * shards) - backward
    found += max(behind, seconds(last, copies, layout.tp * shards))
    moved = (m * hidden + once) * (shards - 1) / shards + 2 * gradients / shards * (copies - 1) / copies  # fmt: skip
    return found, moved
