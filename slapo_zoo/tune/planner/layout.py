"""Layouts: the configurations of mesh, micro-batches, pipeline order and recomputation that the planner tries."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.token_cut import WAYS
from slapo_zoo.pipeline.orders import StageMap, find_order
from slapo_zoo.pipeline.timeline import BACKWARD, BACKWARD_WEIGHT, FORWARD
from slapo_zoo.zoo.options import BuildOptions

RECOMPUTE = ((0.0, ""), (0.25, ""), (0.5, ""), (0.75, ""), (1.0, "save_matmuls"), (1.0, ""))
LEAST = ((1.0, "sharded"),)  # also tried without sequence parallelism
CLOSED = ("1f1b", "gpipe", "interleaved_1f1b")  # orders whose time has a closed form
MOST_ROWS = 64  # rows of a micro-batch
MOST_INTERLEAVED = 32  # ranks of an interleaved pipeline


@dataclass(frozen=True, order=True)
class Layout:
    """Layout: one configuration that the planner evaluates, with fields named like arguments of `from_pretrained`.

    Args:
        tp: ranks that shard each layer.
        pp: ranks that shard the layers into stages.
        dp: data-parallel replicas.
        rows: rows of a micro-batch.
        micro_batches: micro-batches per step and replica.
        pipeline_order: name of the pipeline order.
        stages_per_rank: pipeline stages on each pp rank.
        checkpoint_ratio: share of the blocks that are recomputed, 0 to 1.
        checkpoint_policy: what the recomputed blocks save: "" nothing, "save_matmuls" outputs of matrix products,
            "attention" all but what lies between q, k, v and the output of attention, "offload" all, on the host,
            "sharded" a tp shard of their input; or a tuple with one of these, "keep" or "recompute" for each block.
        sequence_parallel: whether tp ranks shard the tokens too.
        dp_shard: dp ranks over which ZeRO shards; 1 turns ZeRO off.
        zero_stage: ZeRO shards optimizer states (1), gradients too (2), weights too (3).
        cp: ranks that shard the tokens of each row.
        cp_attention: how attention sees the tokens of all cp ranks, e.g. "gather" or "ulysses".
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    rows: int = 1
    micro_batches: int = 1
    pipeline_order: str = "1f1b"
    stages_per_rank: int = 1
    checkpoint_ratio: float = 0.0
    checkpoint_policy: str | tuple[str, ...] = ""
    sequence_parallel: bool = False
    dp_shard: int = 1
    zero_stage: int = 3
    cp: int = 1
    cp_attention: str = WAYS[0]

    @classmethod
    def of(cls, options: BuildOptions, mesh: Mesh, rows: int, count: int | None) -> "Layout":
        """Return the layout (the planner's configuration) with the options and mesh of a loaded model, `rows` rows per
        micro-batch and `count` micro-batches per step and replica; `count` None takes 2 * pp, or 1 without a pipeline.
        """
        places = StageMap.make(options.pipeline_order, mesh.pp, options.stages_per_rank)
        known = {
            **vars(options), **vars(mesh), "rows": rows, "stages_per_rank": places.per_rank,
            "micro_batches": count or max(1, 2 * mesh.pp * (mesh.pp > 1)),
        }  # fmt: skip
        return cls(**{field.name: known[field.name] for field in fields(cls)})

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same parameters, over which ZeRO may shard them."""
        return self.dp * self.cp

    @property
    def devices(self) -> int:
        """Return the number of devices of the whole mesh."""
        return self.tp * self.pp * self.replicas

    @property
    def stages(self) -> int:
        """Return the number of stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    def knobs(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` for this layout that differ from their defaults."""
        defaults, found = asdict(Layout()), asdict(self)
        found.pop("rows")
        return {n: v for n, v in found.items() if n in ("tp", "pp", "dp") or v != defaults[n]}

    def __str__(self) -> str:
        mesh = f"tp={self.tp} pp={self.pp} dp={self.dp}" + f" cp={self.cp}" * (self.cp > 1)
        mesh += f" {self.cp_attention}" * (self.cp > 1)
        text = f"{mesh} micro-batches {self.micro_batches} x {self.rows} rows"
        if self.stages_per_rank > 1:
            text += f" {self.pipeline_order} x{self.stages_per_rank}"
        if not isinstance(self.checkpoint_policy, str):
            text += " a policy per block"
        elif self.checkpoint_ratio:
            kept = f" ({self.checkpoint_policy})" if self.checkpoint_policy else ""
            text += f" recompute {self.checkpoint_ratio:g}{kept}"
        if self.dp_shard > 1:
            text += f" dp_shard={self.dp_shard} ZeRO-{self.zero_stage}"
        return text + (" sequence parallel" if self.sequence_parallel else "")


def places_of(layout: Layout) -> StageMap:
    """Return the map from the pipeline ranks of a layout to the stages that each rank holds, and back."""
    return _places(layout.pipeline_order, layout.pp, layout.stages_per_rank)


@lru_cache(maxsize=512)
def _places(order: str, pp: int, virtual: int) -> StageMap:
    return StageMap.make(order, pp, virtual if virtual > 1 else None)


def divisors(n: int) -> list[int]:
    """Return all divisors of n, in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def layouts(
    tp: int, gpus: int, batch: int, blocks: int, orders: Sequence[str] = ("1f1b", "interleaved_1f1b"),
    sequence_parallel: bool = False, cp: int = 1, cp_attention: str = WAYS[0],
) -> Iterator[Layout]:  # fmt: skip
    """Yield every layout with the given sizes of tp and cp that uses all `gpus` and splits the batch evenly.

    Args:
        tp: ranks that shard each layer.
        gpus: number of devices: tp * pp * dp * cp.
        batch: rows of a step over all replicas.
        blocks: number of blocks of the model, which bounds the number of stages.
        orders: pipeline orders to try.
        sequence_parallel: tp ranks shard the tokens too.
        cp: ranks that shard the tokens of each row; with cp > 1 only layouts with checkpoint_policy="" are made.
        cp_attention: how attention gets the keys of other cp ranks: "gather" (the default), "ulysses" or "ring".
    """
    whole = tp > 1 and not sequence_parallel
    policies = RECOMPUTE + LEAST * whole if cp == 1 else [one for one in RECOMPUTE if not one[1]]
    for pp in (n for n in divisors(gpus // tp // cp) if n <= blocks):
        dp = gpus // tp // cp // pp
        if batch % dp:
            continue
        for rows in (n for n in divisors(batch // dp) if n <= MOST_ROWS):
            count = batch // dp // rows
            for order, virtual in orders_for(pp, count, blocks, orders):
                for ratio, policy in policies:
                    yield Layout(tp, pp, dp, rows, count, order, virtual, ratio, policy, sequence_parallel,
                                 cp=cp, cp_attention=cp_attention)  # fmt: skip


def orders_for(
    pp: int, count: int, blocks: int, orders: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """Yield (pipeline order, stages per rank) for each of `orders` that can run `count` micro-batches on `pp` ranks.

    A model of `blocks` blocks has at most `blocks` stages. With pp=1 the only pair is ("1f1b", 1).
    """
    if pp == 1:
        yield "1f1b", 1
        return
    for name in orders:
        many = (2, 4) if find_order(name).many else (find_order(name).stages_per_rank,)
        for virtual in many if pp <= MOST_INTERLEAVED or many == (1,) else ():
            if pp * virtual <= blocks and _places(name, pp, virtual).admits(count):
                yield name, virtual


@lru_cache(maxsize=4096)
def in_flight(order: str, pp: int, virtual: int, micro_batches: int, rank: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage of a pipeline rank, in order, has run forward but not backward at the
    moment when their sum is largest. `order` is a pipeline order, `virtual` the stages per rank, `rank` the rank along
    pp.
    """
    if pp == 1:
        return (1,)
    if order in ("1f1b", "gpipe"):
        deep = order == "gpipe" or micro_batches < pp
        return (micro_batches if deep else pp - rank,)
    if order == "interleaved_1f1b":
        # a rank warms up with a round of every chunk but the last, and two more per rank behind it
        ahead = min(micro_batches * virtual, (virtual - 1) * pp + 2 * (pp - 1 - rank) + 1)
        chunks = [i // pp % virtual for i in range(ahead)]
        return tuple(chunks.count(chunk) for chunk in range(virtual))
    return _simulated(order, pp, virtual, micro_batches)[rank]


@lru_cache(maxsize=512)
def _simulated(order: str, pp: int, virtual: int, micro_batches: int) -> list[tuple[int, ...]]:
    """Return `in_flight` of every pipeline rank for any `order`, by going through its actions one by one."""
    places = places_of(Layout(pp=pp, pipeline_order=order, stages_per_rank=virtual))
    found = []
    for rank, actions in enumerate(places.actions(micro_batches)):
        now = dict.fromkeys(places.stages_of(rank), 0)
        most = tuple(now.values())
        for action in actions:
            ends = action.kind in (BACKWARD, BACKWARD_WEIGHT)
            now[action.stage] += (action.kind == FORWARD) - ends
            if sum(now.values()) > sum(most):
                most = tuple(now.values())
        found.append(most)
    return found
