"""Pipeline orders: number and placement of stages per rank, sequence of actions, and torch's runtime for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from slapo_zoo.errors import MeshError
from slapo_zoo.pipeline.timeline import BACKWARD, FORWARD, Action


@dataclass(frozen=True)
class Order:
    """Rule (1F1B, interleaved, ...) for the order in which stages run the forwards and backwards of micro-batches.

    Args:
        name: name of the schedule class in torch.distributed.pipelining.
        source: paper that describes the order.
        stages_per_rank: default number of stages per rank.
        many: True if any number of stages per rank from 2 is allowed.
        v_shape: True if rank r holds stages r and 2 * pp - 1 - r; otherwise rank r holds stages r, r + pp, ...
        fewest: least number of micro-batches: 1, or "stages" for the number of stages.
        splits: True if backwards run in two halves, of inputs and of weights.
    """

    name: str
    source: str
    stages_per_rank: int = 1
    many: bool = False
    v_shape: bool = False
    fewest: int | str = 1
    splits: bool = False


ORDERS = {
    "1f1b": Order("1F1B", "Narayanan et al. 2019, PipeDream", fewest="stages"),
    "gpipe": Order("GPipe", "arXiv:1811.06965"),
    "interleaved_1f1b": Order("Interleaved1F1B", "arXiv:2104.04473", 2, many=True),
    "looped_bfs": Order("LoopedBFS", "arXiv:2211.05953", 2, many=True),
    "interleaved_zero_bubble": Order(
        "InterleavedZeroBubble", "arXiv:2401.10241", 2, many=True, splits=True
    ),
    "zbv": Order("ZBVZeroBubble", "arXiv:2401.10241, section 6", 2, v_shape=True, splits=True),
    "dualpipev": Order(
        "DualPipeV", "arXiv:2412.19437", 2, v_shape=True, fewest="stages", splits=True
    ),
}


def find_order(name: str) -> Order:
    """Return the pipeline order with that name, e.g. "1f1b"; an unknown name raises MeshError, which lists all names."""
    if name not in ORDERS:
        hint = f"choose one of {', '.join(ORDERS)}"
        raise MeshError("pipeline", f"pipeline_order={name!r}", "no such order", hint)
    return ORDERS[name]


@dataclass(frozen=True)
class StageMap:
    """Placement of pipeline stages on the ranks of mesh dim pp, and the order of their forwards and backwards.

    Args:
        order: the pipeline order, such as 1F1B.
        pp: number of ranks.
        per_rank: number of stages on each rank.
    """

    order: Order
    pp: int
    per_rank: int

    @staticmethod
    def make(name: str, pp: int, stages_per_rank: int | None) -> "StageMap":
        """Construct the stage map of the order `name` on `pp` ranks; `stages_per_rank` None takes the order's default,
        and a number that the order does not allow raises MeshError.
        """
        order = find_order(str(name).lower())  # torch spells it "1F1B"
        if pp == 1:
            return StageMap(order, 1, 1)
        if order.splits and torch.__version__ < (2, 13):
            problem = f"found torch {torch.__version__}, which frees the graph between the halves of a split backward"
            hint = "install torch 2.13, or choose 1f1b, gpipe, interleaved_1f1b or looped_bfs"
            raise MeshError("pipeline", f"pipeline_order={name!r}", problem, hint)
        per_rank = stages_per_rank or order.stages_per_rank
        if per_rank != order.stages_per_rank and not (order.many and per_rank >= 2):
            takes = f"{order.stages_per_rank}{' or more' * order.many}"
            problem = f"found {per_rank}, the order {name!r} takes {takes} per rank"
            hint = "leave stages_per_rank out, or choose an interleaved order"
            raise MeshError("pipeline", "stages_per_rank", problem, hint)
        return StageMap(order, pp, per_rank)

    @property
    def num_stages(self) -> int:
        """Return the number of stages over all ranks."""
        return self.pp * self.per_rank

    def rank_of(self, stage: int) -> int:
        """Return the pp coordinate of the rank that holds a stage."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.order.v_shape and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the indices of the stages that the rank with pp coordinate `rank` holds, in ascending order."""
        back = self.pp - 1 - rank if self.order.v_shape else rank
        return [turn * self.pp + (back if turn % 2 else rank) for turn in range(self.per_rank)]

    def check_micro_batches(self, count: int) -> None:
        """Raise MeshError when the order cannot run with `count` micro-batches."""
        need = self.num_stages if self.order.fewest == "stages" else 1
        if self.order.name == "1F1B":
            return  # with fewer, GPipe runs instead
        if count < need:
            problem = f"found {count} micro-batches, {self.order.name} needs at least {need}"
            hint = f"pass micro_batches={need} or more, and a batch whose rows it divides"
            raise MeshError("pipeline", "micro_batches", problem, hint)
        rounds = max(1, count // self.pp)
        if self.order.many and self.order.name != "LoopedBFS" and count % rounds:
            problem = f"found {count} micro-batches, which {self.order.name} cannot run in {rounds} equal rounds"
            hint = f"pass micro_batches={self.pp * rounds}, and a batch whose rows it divides"
            raise MeshError("pipeline", "micro_batches", problem, hint)

    def admits(self, count: int) -> bool:
        """Return whether the pipeline order can run with `count` micro-batches."""
        try:
            self.check_micro_batches(count)
        except MeshError:
            return False
        return True

    def usual_micro_batches(self, rows: int) -> int:
        """Return the number of micro-batches of `rows` rows if the user gave none: 1 without a pipeline, else a divisor
        of `rows` with which the pipeline's order can run: the smallest that is >= 2 * pp, or without one the largest.
        If the order can run with no divisor, return `rows`, which the step then refuses.
        """
        if self.pp == 1:
            return 1
        legal = [i for i in range(1, rows + 1) if rows % i == 0 and self.admits(i)]
        return next((i for i in legal if i >= 2 * self.pp), legal[-1] if legal else rows)

    def runtime(self, stages: Sequence[Any], micro_batches: int, **options: Any) -> Any:
        """Return the torch.distributed.pipelining runtime that runs the actions of the order on this rank's stages.

        Args:
            stages: this rank's stages, objects of a subclass of torch's `PipelineStage`.
            micro_batches: number of micro-batches of the step.
            **options: options of torch's class, e.g. `loss_fn`.
        """
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        known = _with_communication(self, micro_batches)
        runtime: Any = _PipelineScheduleRuntime(list(stages), micro_batches, **options)
        runtime.pipeline_order_with_comms = known.pipeline_order_with_comms
        for one in (runtime, *stages):
            one.stage_index_to_group_rank = known.stage_index_to_group_rank
        return runtime

    def actions(self, micro_batches: int) -> list[list[Action]]:
        """Return each rank's forwards and backwards, in order, of a step with `micro_batches` micro-batches."""
        self.check_micro_batches(micro_batches)
        if self.order.name in ("1F1B", "GPipe"):
            deep = self.order.name == "GPipe" or micro_batches < self.pp
            return [
                _one_stage(rank, micro_batches if deep else self.pp - rank, micro_batches)
                for rank in range(self.pp)
            ]
        return torch_actions(self, micro_batches)


def _one_stage(stage: int, ahead: int, micro_batches: int) -> list[Action]:
    """Return a stage's actions: `ahead` forwards, then a backward and a forward in turn, then the remaining backwards."""
    found = [Action(stage, FORWARD, i) for i in range(ahead)]
    for i in range(micro_batches):
        found.append(Action(stage, BACKWARD, i))
        if ahead + i < micro_batches:
            found.append(Action(stage, FORWARD, ahead + i))
    return found


def _dummy_stages(places: StageMap) -> list[Any]:
    """Return rank 0's stages as objects with only those attributes from which torch computes the order of actions."""
    from torch.nn import Module

    known = {"num_stages": places.num_stages, "group_size": places.pp, "group_rank": 0}
    return [
        SimpleNamespace(**known, stage_index=index, is_last=False, submod=Module())
        for index in places.stages_of(0)
    ]


@lru_cache(maxsize=64)
def _with_communication(places: StageMap, micro_batches: int) -> Any:
    """Return torch's pipeline runtime, made with dummy stages, for the order and placement in `places`. It holds each
    rank's actions for `micro_batches` micro-batches, and the sends and receives that torch added between the actions.

    Uses the private `_Action` and `_PipelineScheduleRuntime`, as torch's `_load_csv` does.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(_dummy_stages(places), micro_batches)
    ranks = enumerate(places.actions(micro_batches))
    runtime._prepare_schedule_with_comms(
        {rank: [_Action.from_str(str(action)) for action in actions] for rank, actions in ranks}
    )
    return runtime


@lru_cache(maxsize=64)
def torch_actions(places: StageMap, micro_batches: int) -> list[list[Action]]:
    """Return the actions of each rank in the order of torch's schedule class `places.order.name`.

    The class is made with dummy stages, and its attribute `pipeline_order`, which torch does not document, is read.
    Two actions that torch overlaps are listed one after the other, as torch's runtime runs them.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    cls: Any = get_schedule_class(places.order.name)
    order = cls(_dummy_stages(places), micro_batches).pipeline_order
    return [
        [
            Action(part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
        ]
        for rank in range(places.pp)
    ]


def balanced_cuts(costs: Sequence[float], may_cut: Sequence[int], num_stages: int) -> list[int]:
    """Return after which unit calls the stages should end, so that the most expensive stage is as cheap as possible.

    Args:
        costs: cost of each unit call, in the order in which they run.
        may_cut: indices of calls after which a stage may end (the blocks).
        num_stages: number of stages.

    Returns:
        `num_stages - 1` indices from `may_cut`, in ascending order.
    """
    if num_stages - 1 > len(may_cut):
        problem = (
            f"found {num_stages} stages, but only {len(may_cut)} blocks after which a stage may end"
        )
        hint = f"choose pp and stages_per_rank whose product is at most {len(may_cut) + 1}"
        raise MeshError("pipeline", "stages", problem, hint)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[i]: (largest cost of a stage, cuts) when the last stage ends after may_cut[i].
    best = {i: (total[at + 1], [at]) for i, at in enumerate(may_cut)}
    for _ in range(num_stages - 2):
        best = {
            i: min(
                (max(best[j][0], total[at + 1] - total[may_cut[j] + 1]), [*best[j][1], at])
                for j in best
                if j < i
            )
            for i, at in enumerate(may_cut)
            if any(j < i for j in best)
        }
    if num_stages == 1:
        return []
    return min(
        (max(worst, total[-1] - total[cuts[-1] + 1]), cuts) for worst, cuts in best.values()
    )[1]
