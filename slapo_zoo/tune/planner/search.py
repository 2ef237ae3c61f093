"""Every configuration of a cluster, judged on paper: what fits, what does not and why, what is fastest."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from slapo_zoo.hf import models as hf
from slapo_zoo.pipeline.unit_costs import unit_costs
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.orders import StageMap, balanced_cuts
from slapo_zoo.tune.planner.hardware import GIB, Hardware
from slapo_zoo.tune.planner.layout import Layout, divisors, layouts
from slapo_zoo.tune.planner.memory import RankMemory, Recompute, StageMemory, rank_memory, stage_memory
from slapo_zoo.tune.planner.profile import Family, Profile
from slapo_zoo.tune.planner.timing import StageTime, StepTime, stage_time, step_time
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.pipeline.stages import leaf_units
from slapo_zoo.zoo.table import base_prefix
from slapo_zoo.pipeline.timeline import BACKWARD, BACKWARD_WEIGHT, FORWARD
from slapo_zoo.zoo.apply import block_paths, spread

PARTS = ("weights", "gradients", "optimizer", "activations", "working", "buffers")


@dataclass(frozen=True)
class Forecasted:
    """A layout and what it would take.

    Args:
        layout: the configuration.
        step: times and bytes of a step.
        ranks: memory of every pipeline rank.
        fullest: which of them needs most.
    """

    layout: Layout
    step: StepTime
    ranks: list[RankMemory]
    fullest: int

    @property
    def memory(self) -> float:
        """Bytes of the fullest rank, without what libraries take."""
        return self.ranks[self.fullest].total


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Args:
        feasible: layouts that fit, the fastest first.
        refused: (a layout or a tp size, why it cannot be), the nearest to fitting first.
        looked_at: number of configurations.
        hardware: that was assumed.
        rows: of a step.
        seq_len: tokens of a row.
        parameters: of the model.
    """

    feasible: list[Forecasted]
    refused: list[tuple[str, str]]
    looked_at: int
    hardware: Hardware
    rows: int
    seq_len: int
    parameters: int

    def tokens_per_s(self, found: Forecasted) -> float:
        """Of the whole cluster."""
        return self.rows * self.seq_len / found.step.seconds


class Planner:
    """Judges layouts of one model on one kind of device.

    Args:
        config: of `transformers`.
        hardware: the devices.
        seq_len: tokens of a row.
        dtype: of the parameters.
        auto_class: which head.
    """

    def __init__(
        self, config: Any, hardware: Hardware, seq_len: int, dtype: torch.dtype = torch.bfloat16,
        auto_class: Any = None,
    ):  # fmt: skip
        self.family, self.hardware = Family(config, auto_class), hardware
        self.seq_len, self.dtype = seq_len, dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self._profiles: dict[tuple[int, bool], Profile] = {}
        self._stages: dict[Any, Any] = {}
        self._costs: list[tuple[str, float]] = []

    def profile(self, tp: int, sequence_parallel: bool = False) -> Profile:
        """The model on one of so many tp ranks; rehearsed once."""
        key = tp, sequence_parallel and tp > 1
        if key not in self._profiles:
            self._profiles[key] = self.family.profile(
                *key, self.seq_len, self.dtype, on_cpu=not self.hardware.foreach
            )
        return self._profiles[key]

    def search(self, gpus: int, batch: int, orders: Sequence[str] | None = None) -> Found:
        """Look at every layout that uses all devices.

        Args:
            gpus: number of devices.
            batch: rows of a step over all copies.
            orders: of the pipeline to look at.

        Raises:
            MeshError: no layout divides the devices and the batch.
        """
        limit = self.hardware.memory - self.hardware.reserved
        fits, refused, looked_at = [], [], 0
        best: dict[Any, Forecasted] = {}  # the least of those that do not fit, per division
        for layout in self._candidates(gpus, batch, orders, refused):
            looked_at += 1
            found = self.forecast(layout)
            if found.memory <= limit:
                fits.append(found)
                continue
            key = layout.tp, layout.pp, layout.dp
            if key not in best or found.memory < best[key].memory:
                best[key] = found
        if not looked_at:
            problem = f"found no way to divide {gpus} devices and {batch} rows"
            raise MeshError("plan", f"--gpus {gpus} --batch {batch}", problem, _near(gpus, batch))
        fitting = {(f.layout.tp, f.layout.pp, f.layout.dp) for f in fits}
        short = sorted((f for key, f in best.items() if key not in fitting), key=lambda f: f.memory)
        refused = [(str(f.layout), self.why(f)) for f in short] + refused
        fits.sort(key=lambda found: (found.step.seconds, found.memory, found.layout))
        return Found(fits, refused, looked_at, self.hardware, batch, self.seq_len,
                     self.family.total_parameters)  # fmt: skip

    def _candidates(
        self, gpus: int, batch: int, orders: Sequence[str] | None, refused: list[tuple[str, str]]
    ) -> Iterator[Layout]:
        blocks = sum(name in self._blocks() for name, _ in self.costs())
        more = {} if orders is None else {"orders": orders}
        for tp in (n for n in divisors(gpus) if self.hardware.per_node % n == 0):
            for divided in (False, True)[: 1 + (tp > 1 and self.seq_len % tp == 0)]:
                try:
                    self.profile(tp, divided)
                except SlapoError as error:
                    what = f"tp={tp}" + " sequence parallel" * divided
                    refused.append((what, error.problem))
                    continue
                yield from layouts(tp, gpus, batch, blocks, sequence_parallel=divided, **more)

    def forecast(self, layout: Layout) -> Forecasted:
        """What a layout takes."""
        stages, times = zip(*self._stages_of(layout), strict=True)
        places = StageMap.make(layout.pipeline_order, layout.pp,
                               layout.stages_per_rank if layout.stages_per_rank > 1 else None)  # fmt: skip
        profile = self.profile(layout.tp, layout.sequence_parallel)
        uses = zip(profile.units, profile.uses(layout.rows), strict=True)
        scratch = self.hardware.scratch * max(use.output for unit, use in uses if unit.is_block)
        ranks = []
        for rank in range(layout.pp):
            mine = places.stages_of(rank)
            held = in_flight(layout.pipeline_order, layout.pp, layout.stages_per_rank,
                             layout.micro_batches, rank)  # fmt: skip
            found = rank_memory([stages[i] for i in mine], held, layout.micro_batches, layout.dp,
                                self.hardware.optimizer_copies)  # fmt: skip
            found = replace(found, total=found.total + scratch, working=found.working + scratch)
            ranks.append(self._with_foreach(found))
        fullest = max(range(layout.pp), key=lambda rank: ranks[rank].total)
        step = step_time(times, layout, ranks[fullest].weights, self.hardware)
        return Forecasted(layout, step, ranks, fullest)

    def _with_foreach(self, found: RankMemory) -> RankMemory:
        """The many-tensor form of an optimizer makes temporaries of all parameters at once."""
        if not self.hardware.foreach:
            return found
        step = found.weights * 2 + found.optimizer + found.weights
        return replace(found, total=max(found.total, step))

    def why(self, found: Forecasted) -> str:
        """Why a layout does not fit."""
        total = (found.memory + self.hardware.reserved) / GIB
        rank = found.ranks[found.fullest]
        sizes = {name: getattr(rank, name) for name in PARTS} | {
            "libraries": self.hardware.reserved
        }
        parts = ", ".join(
            f"{n} {size / GIB:.1f}" for n, size in sizes.items() if size / GIB >= 0.05
        )
        return (f"stage {found.fullest} needs {total:.1f} GiB of {self.hardware.memory / GIB:.1f}"
                f" ({parts})")  # fmt: skip

    def _stages_of(self, layout: Layout) -> list[tuple[StageMemory, StageTime]]:
        key = (layout.tp, layout.sequence_parallel, layout.stages, layout.rows,
               layout.checkpoint_ratio, layout.checkpoint_policy)  # fmt: skip
        if key not in self._stages:
            profile = self.profile(layout.tp, layout.sequence_parallel)
            blocks = self.family.blocks
            chosen = frozenset(blocks[i] for i in spread(len(blocks), layout.checkpoint_ratio))
            again = Recompute(chosen, layout.checkpoint_policy)
            edges = [0, *self.cuts(layout.stages), len(profile.units)]
            self._stages[key] = [
                (stage_memory(profile, a, b, layout.rows, again),
                 stage_time(profile, a, b, layout.rows, again, layout.tp, self.hardware, self.dtype_name))
                for a, b in itertools.pairwise(edges)
            ]  # fmt: skip
        return self._stages[key]

    def costs(self) -> list[tuple[str, float]]:
        """(unit, estimated operations) of every call of the unscheduled model, as cuts are placed by."""
        if not self._costs:
            family = self.family
            config = copy.deepcopy(family.small)
            model = hf.build_on_meta(family.cls, config, torch.float32, family.table.seam)
            blocks = block_paths(Schedule(model, Mesh()), family.table)
            late = [base_prefix(model) + path for path in family.table.after_blocks]
            found = unit_costs(model, leaf_units(model, blocks, late))
            self._costs = family.repeat([(c.unit, c.step) for c in found])
        return self._costs

    def _blocks(self) -> set[str]:
        return set(self.family.blocks)

    def cuts(self, stages: int) -> list[int]:
        """Index of the first call of every stage but the first."""
        key = "cuts", stages
        if key not in self._stages:
            names, costs = zip(*self.costs(), strict=True)
            may_cut = [i for i, name in enumerate(names) if name in self._blocks()]
            self._stages[key] = [i + 1 for i in balanced_cuts(costs, may_cut, stages)]
        return self._stages[key]


def _near(gpus: int, batch: int) -> str:
    return f"choose a batch that {gpus} or a divisor of it divides, e.g. {-(-batch // gpus) * gpus}"


@lru_cache(maxsize=4096)
def in_flight(order: str, pp: int, laps: int, micro_batches: int, rank: int) -> tuple[int, ...]:
    """Micro-batches that each stage of a rank holds when the rank holds most."""
    if pp == 1:
        return (1,)
    if laps == 1:
        deep = order == "gpipe" or micro_batches < pp
        return (micro_batches if deep else pp - rank,)
    return _interleaved(order, pp, laps, min(micro_batches, 4 * pp))[rank]


@lru_cache(maxsize=512)
def _interleaved(order: str, pp: int, laps: int, micro_batches: int) -> list[tuple[int, ...]]:
    """Of every rank, from the order itself; after some rounds it repeats."""
    places = StageMap.make(order, pp, laps)
    found = []
    for rank, actions in enumerate(places.actions(micro_batches)):
        now = dict.fromkeys(places.stages_of(rank), 0)
        most = tuple(now.values())
        for action in actions:
            now[action.stage] += (action.kind == FORWARD) - (
                action.kind in (BACKWARD, BACKWARD_WEIGHT)
            )
            if sum(now.values()) > sum(most):
                most = tuple(now.values())
        found.append(most)
    return found


def require_feasible(found: Found, what: str) -> Forecasted:
    """The fastest layout; MeshError with the nearest miss where none fits."""
    if found.feasible:
        return found.feasible[0]
    name, reason = found.refused[0]
    hint = "more devices, a smaller batch or shorter rows; --explain lists every layout"
    raise MeshError("plan", what, f"no layout fits; the nearest is {name}: {reason}", hint)
