"""Pipeline orders: how many stages a rank holds, which ones, and which runtime class runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from slapo_zoo.errors import MeshError
from slapo_zoo.pipeline.csv_order import CsvOrder, read_order
from slapo_zoo.pipeline.timeline import BACKWARD, FORWARD, Action


@dataclass(frozen=True)
class Order:
    """One way to interleave forwards and backwards of micro-batches.

    Args:
        name: of the class in torch.distributed.pipelining.
        source: the paper.
        stages_per_rank: of each rank; more may be asked for where `many`.
        many: any number of stages per rank from 2.
        v_shape: rank r holds stages r and 2 * pp - 1 - r, instead of r, r + pp, ...
        fewest: micro-batches needed: 1, or "stages".
    """

    name: str
    source: str
    stages_per_rank: int = 1
    many: bool = False
    v_shape: bool = False
    fewest: int | str = 1


ORDERS = {
    "1f1b": Order("1F1B", "Narayanan et al. 2019, PipeDream", fewest="stages"),
    "gpipe": Order("GPipe", "arXiv:1811.06965"),
    "interleaved_1f1b": Order("Interleaved1F1B", "arXiv:2104.04473", 2, many=True),
    "looped_bfs": Order("LoopedBFS", "arXiv:2211.05953", 2, many=True),
    "interleaved_zero_bubble": Order("InterleavedZeroBubble", "arXiv:2401.10241", 2, many=True),
    "zbv": Order("ZBVZeroBubble", "arXiv:2401.10241, section 6", 2, v_shape=True),
    "dualpipev": Order("DualPipeV", "arXiv:2412.19437", 2, v_shape=True, fewest="stages"),
}


def find_order(name: str) -> Order:
    """The order of a name; MeshError lists those there are."""
    if name not in ORDERS:
        hint = f"choose one of {', '.join(ORDERS)}, or name a .csv file"
        raise MeshError("pipeline", f"pipeline_order={name!r}", "no such order", hint)
    return ORDERS[name]


@dataclass(frozen=True)
class StageMap:
    """Which rank of the mesh dim pp holds which stage.

    Args:
        order: tells the shape.
        pp: number of ranks.
        per_rank: stages of each rank.
        custom: an order from a file.
    """

    order: Order
    pp: int
    per_rank: int
    custom: CsvOrder | None = None

    @staticmethod
    def make(name: str, pp: int, stages_per_rank: int | None) -> "StageMap":
        """Check the numbers against the order: a name, or the path of a CSV file."""
        if str(name).endswith(".csv"):
            return StageMap._from_file(str(name), pp, stages_per_rank)
        order = find_order(str(name).lower())  # torch spells it "1F1B"
        if pp == 1:
            return StageMap(order, 1, 1)
        per_rank = stages_per_rank or order.stages_per_rank
        if per_rank != order.stages_per_rank and not (order.many and per_rank >= 2):
            problem = f"found {per_rank}, the order {name!r} takes {order.stages_per_rank}"
            hint = "leave it out, or choose an interleaved order"
            raise MeshError("pipeline", "stages_per_rank", problem, hint)
        return StageMap(order, pp, per_rank)

    @staticmethod
    def _from_file(path: str, pp: int, stages_per_rank: int | None) -> "StageMap":
        custom = read_order(path, pp)
        if pp == 1:
            return StageMap(Order(path, "its file"), 1, 1)
        order = Order(path, "its file", len(custom.rank_of_stage) // pp)
        if stages_per_rank not in (None, order.stages_per_rank):
            problem = f"found {stages_per_rank}, the file has {order.stages_per_rank}"
            raise MeshError("pipeline", "stages_per_rank", problem, "leave it out")
        return StageMap(order, pp, order.stages_per_rank, custom)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pp * self.per_rank

    @property
    def waits_for_sends(self) -> bool:
        """Return whether torch's runtime waits for the sends of a micro-batch before the step's end."""
        return self.order.name in ("1F1B", "GPipe")

    def rank_of(self, stage: int) -> int:
        """Return the pp coordinate that holds a stage."""
        if self.custom is not None:
            return self.custom.rank_of_stage[stage]
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.order.v_shape and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a pp coordinate, in order."""
        if self.custom is not None:
            return [s for s in range(self.num_stages) if self.rank_of(s) == rank]
        back = self.pp - 1 - rank if self.order.v_shape else rank
        return [turn * self.pp + (back if turn % 2 else rank) for turn in range(self.per_rank)]

    def check_micro_batches(self, count: int) -> None:
        """MeshError when the order cannot run with `count` micro-batches."""
        if self.custom is not None and count != self.custom.micro_batches:
            problem = (
                f"found {count}, the order in {self.order.name} is for {self.custom.micro_batches}"
            )
            hint = f"pass micro_batches={self.custom.micro_batches}"
            raise MeshError("pipeline", "micro_batches", problem, hint)
        need = self.num_stages if self.order.fewest == "stages" else 1
        if self.order.name == "1F1B":
            return  # with fewer, GPipe does the same
        if count < need:
            problem = f"found {count} micro-batches, {self.order.name} needs at least {need}"
            raise MeshError("pipeline", "micro_batches", problem, "pass more, or more rows")
        rounds = max(1, count // self.pp)
        if self.order.many and self.order.name != "LoopedBFS" and count % rounds:
            problem = (
                f"found {count} micro-batches, {self.order.name} needs a multiple of {self.pp}"
            )
            raise MeshError("pipeline", "micro_batches", problem, f"pass {self.pp * rounds}")

    def admits(self, count: int) -> bool:
        """Return whether the order can run with `count` micro-batches."""
        try:
            self.check_micro_batches(count)
        except MeshError:
            return False
        return True

    def runtime(self, stages: Sequence[Any], micro_batches: int, **options: Any) -> Any:
        """The schedule object of torch.distributed.pipelining for this rank's stages.

        1F1B and GPipe run in classes of their own, which send and receive in one call; a test holds
        these to `actions`.
        """
        from torch.distributed.pipelining.schedules import get_schedule_class

        if self.custom is not None:
            return csv_runtime(self.custom, stages, micro_batches, **options)
        name = self.order.name
        if name == "1F1B" and micro_batches < self.num_stages:
            name = "GPipe"  # 1F1B wants a micro-batch in flight per stage; with fewer both are one
        cls: Any = get_schedule_class(name)
        given = stages[0] if self.per_rank == 1 else list(stages)
        return cls(given, micro_batches, **options)

    def actions(self, micro_batches: int) -> list[list[Action]]:
        """Return the actions of each rank, in order; nothing is run."""
        self.check_micro_batches(micro_batches)
        if self.custom is not None:
            return [list(actions) for actions in self.custom.actions]
        if self.order.name in ("1F1B", "GPipe"):
            deep = self.order.name == "GPipe" or micro_batches < self.pp
            return [
                _one_stage(rank, micro_batches if deep else self.pp - rank, micro_batches)
                for rank in range(self.pp)
            ]
        return torch_actions(self, micro_batches)


def _one_stage(stage: int, ahead: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage: some forwards ahead, then backward and forward in turn, then the other backwards."""
    found = [Action(stage, FORWARD, i) for i in range(ahead)]
    for i in range(micro_batches):
        found.append(Action(stage, BACKWARD, i))
        if ahead + i < micro_batches:
            found.append(Action(stage, FORWARD, ahead + i))
    return found


def torch_actions(places: StageMap, micro_batches: int) -> list[list[Action]]:
    """The order that a class of torch.distributed.pipelining computes; semi-private there.

    It is asked with stand-ins for stages; two actions that overlap are taken one after the other, as
    its runtime performs them.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.nn import Module

    known = {"num_stages": places.num_stages, "group_size": places.pp, "group_rank": 0}
    stages = [
        SimpleNamespace(**known, stage_index=index, is_last=False, submod=Module())
        for index in places.stages_of(0)
    ]
    cls: Any = get_schedule_class(places.order.name)
    order = cls(stages, micro_batches).pipeline_order
    return [
        [
            Action(part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
        ]
        for rank in range(places.pp)
    ]


def csv_runtime(custom: CsvOrder, stages: Sequence[Any], micro_batches: int, **options: Any) -> Any:
    """The schedule object of torch.distributed.pipelining for an order of one's own.

    `_Action.from_str` and `_PipelineScheduleRuntime` are what its `_load_csv` uses; only this
    function names them.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(list(stages), micro_batches, **options)
    cells = {
        rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(custom.cells)
    }
    runtime.pipeline_order = cells
    runtime._prepare_schedule_with_comms(cells)
    return runtime


def balanced_cuts(costs: Sequence[float], may_cut: Sequence[int], num_stages: int) -> list[int]:
    """Return the ends of stages that make the most expensive stage as cheap as possible.

    Args:
        costs: of each unit call, in the order in which they run.
        may_cut: indices after which a stage may end (the blocks).
        num_stages: wanted.

    Returns:
        num_stages - 1 indices out of `may_cut`, in order.
    """
    if num_stages - 1 > len(may_cut):
        problem = f"{num_stages} stages, but the model has {len(may_cut)} places to cut"
        raise MeshError("pipeline", "stages", problem, f"at most {len(may_cut) + 1} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[i]: (largest stage so far, cuts) when the last stage so far ends after may_cut[i].
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
