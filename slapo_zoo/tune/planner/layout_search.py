"""Planner: forecast every layout of a cluster, say which fit into memory, and rank them by step time."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.orders import balanced_cuts
from slapo_zoo.tune.planner.hardware import GIB, Hardware
from slapo_zoo.tune.planner.layout import CLOSED, Layout, divisors, in_flight, layouts, places_of
from slapo_zoo.tune.planner.mixtures import mixed
from slapo_zoo.tune.planner.profile import Profile, Recompute
from slapo_zoo.tune.planner.profiling import Family
from slapo_zoo.tune.planner.refine import STARTS, refine
from slapo_zoo.tune.planner.runtime_kind import RUNTIMES, find_precision, find_runtime
from slapo_zoo.tune.planner.search_result import Forecasted, Found, no_layout
from slapo_zoo.tune.planner.stage_memory import (
    RankMemory,
    StageMemory,
    rank_memory,
    stage_memory,
)
from slapo_zoo.tune.planner.timing import How, StageTime, stage_time, step_time
from slapo_zoo.zoo.apply import block_paths, spread, step_costs, units_of

SHORTEST = 2048  # tokens of a row on a cp rank, in a search
SIMULATED = ("gather", "ulysses")  # ways of attention over cp
WORTH = 0.01  # share of a step that a policy per block must save
PARTS = ("weights", "gradients", "optimizer", "activations", "working", "buffers")


class Planner:
    """Planner that forecasts time and memory of layouts of one model on one kind of device.

    Args:
        config: config of `transformers`.
        hardware: profile of the devices.
        seq_len: tokens of a row.
        precision: "bf16" or "fp16" (float32 master weights and gradients), "bf16-pure" or "fp16-pure"
            (without masters), or "fp32".
        runtime: "eager", "kernels", "compiled" or "megatron": how element-wise operations are run.
        auto_class: model class or Auto class of `transformers`, or its name; None: the class that `config` names.
        padding: whether batches carry an attention mask; without one causal rows need no mask in memory if cp is 1.
    """

    def __init__(
        self, config: Any, hardware: Hardware, seq_len: int, precision: str = "bf16",
        runtime: str = "eager", auto_class: Any = None, padding: bool = True,
    ):  # fmt: skip
        self.precision, self.runtime = find_precision(precision), find_runtime(runtime)
        self.family, self.hardware, self.seq_len = Family(config, auto_class), hardware, seq_len
        self.family.padding = padding
        self.dtype: torch.dtype = getattr(torch, self.precision.dtype)
        self._profiles: dict[tuple[int, bool, int, str], Profile] = {}
        self._stages: dict[Any, Any] = {}
        self._costs: list[tuple[str, float]] = []

    def profile(
        self, tp: int, sequence_parallel: bool = False, cp: int = 1, cp_attention: str = SIMULATED[0]
    ) -> Profile:  # fmt: skip
        """Return the costs of the model's blocks, embeddings and heads on one rank, from a cached dry run. `tp` ranks
        shard each layer, with `sequence_parallel` the tokens too; `cp` ranks shard the tokens of each row, and
        `cp_attention` ("gather", "ulysses") says how attention sees the tokens of all cp ranks.
        """
        key = tp, sequence_parallel and tp > 1, cp, cp_attention
        if cp > 1 and cp_attention not in SIMULATED:
            problem = "the planner does not simulate this way of attention over cp"
            hint = f"pass --cp-attention {' or '.join(SIMULATED)}"
            raise MeshError("plan", f"cp_attention={cp_attention!r}", problem, hint)
        if key not in self._profiles:
            self._profiles[key] = self.family.profile(
                *key[:2], self.seq_len, self.dtype, on_cpu=not self.hardware.foreach,
                scores=self.runtime.scores, parts=self.runtime.parts, cp=cp, cp_attention=cp_attention,
            )  # fmt: skip
        return self._profiles[key]

    def profile_of(self, layout: Layout) -> Profile:
        """Return the costs of the model's blocks, embeddings and heads on one rank under `layout`."""
        return self.profile(layout.tp, layout.sequence_parallel, layout.cp, layout.cp_attention)

    def search(
        self, gpus: int, batch: int, orders: Sequence[str] | None = None, divided: bool = True,
        cut: bool = True,
    ) -> Found:  # fmt: skip
        """Forecast every layout that uses all devices; return those that fit, the fastest first, and the refused ones.

        Args:
            gpus: number of devices.
            batch: rows of a step over all replicas.
            orders: pipeline orders to try; None: 1f1b and interleaved_1f1b, and for the fastest layouts all others.
            divided: whether layouts with sequence parallelism are tried too.
            cut: whether layouts with cp > 1 are tried too, for a model whose rows can be sharded over cp.

        Raises:
            MeshError: no layout uses all devices and splits the batch evenly.
        """
        limit = self.hardware.memory - self.hardware.reserved
        fits, refused, looked_at = [], [], 0
        least: dict[Any, tuple[float, Layout]] = {}  # (tp, pp, dp, cp) --> least that does not fit
        for layout in self._candidates(gpus, batch, orders, (divided, cut), refused):
            looked_at += 1
            layout, memory = self._least_zero(layout, limit)
            if memory <= limit:
                fits.append(self.forecast(layout))
                continue
            key = layout.tp, layout.pp, layout.dp, layout.cp
            least[key] = min(least.get(key, (memory, layout)), (memory, layout))
        if not looked_at:
            raise no_layout(gpus, batch, refused)
        first_pass = len(fits)
        fits += self._refined(fits, limit, orders)
        fits += self._mixed(fits, [at for _, at in least.values()], limit)
        looked_at += len(fits) - first_pass
        fitting = {(f.layout.tp, f.layout.pp, f.layout.dp, f.layout.cp) for f in fits}
        short = sorted((key in fitting, *one) for key, one in least.items())  # no fit at all: first
        refused = [(str(at), self.why(self.forecast(at))) for *_, at in short] + refused
        fits.sort(key=lambda found: (found.step.seconds, found.memory, str(found.layout)))
        return Found(fits, refused, looked_at, self.hardware, batch, self.seq_len,
                     self.family.total_parameters)  # fmt: skip

    def _refined(
        self, fits: Sequence[Forecasted], limit: float, orders: Sequence[str] | None
    ) -> list[Forecasted]:
        """Return forecasts of faster layouts, reached from the fastest ones of `fits` by changing one field at a time.

        `limit` is the bytes of memory per rank, `orders` are the pipeline orders to try (None: all).
        """

        def fit(layout: Layout) -> bool:
            return self.most_memory(layout) <= limit

        known = {found.layout for found in fits}
        better = refine(self.forecast, fit, fits, len(self.family.blocks), orders)
        return list({f.layout: f for f in better if f.layout not in known}.values())

    def _mixed(
        self, fits: Sequence[Forecasted], over: Sequence[Layout], limit: float
    ) -> list[Forecasted]:
        """Return forecasts of layouts that choose for each block to keep, recompute or offload its activations, in the
        fastest way that fits into `limit`; only layouts that are faster than all of `fits`.

        Args:
            fits: forecasts of layouts that fit.
            over: layouts that do not fit, tried where none fits.
            limit: bytes of memory per rank.
        """
        bound: dict[Any, Forecasted] = {}
        for one in sorted(fits, key=lambda f: f.step.seconds)[:STARTS]:
            at = one.layout
            if at.checkpoint_ratio and at.cp == 1:  # with cp > 1 a recomputed block keeps nothing
                bare = replace(at, checkpoint_ratio=0.0, checkpoint_policy="")
                bound.setdefault(bare, one)
        within = (1 - WORTH) * min((f.step.seconds for f in fits), default=float("inf"))
        found = [mixed(self, f.layout, limit, within) for f in bound.values()]
        if not fits:
            found += [mixed(self, layout, limit) for layout in over if layout.cp == 1]
        return [f for f in found if f is not None]

    def _least_zero(self, layout: Layout, limit: float) -> tuple[Layout, float]:
        """Return (`layout` with the first ZeRO stage (0, 1, 3) to fit `limit`, else the last; most bytes of a rank)."""
        memory = self.most_memory(layout)
        for stage in (1, 3) if layout.replicas > 1 else ():
            if memory <= limit:
                break
            layout = replace(layout, dp_shard=layout.replicas, zero_stage=stage)
            memory = self.most_memory(layout)
        return layout, memory

    def _candidates(
        self, gpus: int, batch: int, orders: Sequence[str] | None, tries: tuple[bool, bool],
        refused: list[tuple[str, str]],
    ) -> Iterator[Layout]:  # fmt: skip
        """Yield every layout to forecast, for `batch` rows per step over all replicas; None for `orders` takes 1f1b and
        interleaved_1f1b. `tries` says whether (sequence parallelism, cp > 1) are tried. For each mesh whose dry run
        fails, add (its sizes as text, e.g. "tp=2 cp=2 gather", reason) to `refused`.
        """
        blocks = sum(name in self.family.blocks for name, _ in self.costs())
        more = {} if orders is None else {"orders": orders}
        for tp in (n for n in divisors(gpus) if self.hardware.per_node % n == 0):
            for divided, cp, way in self._divisions(tp, gpus, *tries):
                try:
                    self.profile(tp, divided, cp, way)
                except SlapoError as error:
                    what = f"tp={tp}" + f" cp={cp} {way}" * (cp > 1)
                    refused.append((what + " sequence parallel" * divided, error.problem))
                    continue
                knobs = {"sequence_parallel": divided, "cp": cp, "cp_attention": way, **more}
                yield from layouts(tp, gpus, batch, blocks, **knobs)

    def _divisions(
        self, tp: int, gpus: int, divided: bool, cut: bool
    ) -> Iterator[tuple[bool, int, str]]:
        """Yield each (sequence parallelism, number of cp ranks, how attention sees their tokens) to try with `tp`.

        `divided` allows sequence parallelism, `cut` cp > 1. A cp rank has at least SHORTEST (2048) tokens of a row;
        with cp > 1 tp ranks shard these tokens too if tp divides them.
        """
        lengths = self.family.lengths(self.seq_len)
        for cp in divisors(gpus // tp):
            can = divided and tp > 1 and not any(n % (tp * cp) for n in lengths)
            if cp == 1:
                yield from ((each, 1, SIMULATED[0]) for each in (False, True)[: 1 + can])
            elif (
                cut and self.family.cuts and self.seq_len >= SHORTEST * cp and not self.seq_len % cp
            ):
                yield from ((can, cp, way) for way in SIMULATED)

    def forecast(self, layout: Layout) -> Forecasted:
        """Return predicted time and memory of a training step under `layout`."""
        stages, times = zip(*self.stages_of(layout), strict=True)
        places, ranks = places_of(layout), self.ranks(layout)
        fullest = max(range(layout.pp), key=lambda rank: ranks[rank].total)
        parameters = [sum(stages[i].parameters for i in places.stages_of(r)) for r in range(layout.pp)]  # fmt: skip
        step = step_time(times, layout, max(parameters), self.how(layout))
        return Forecasted(layout, step, ranks, fullest)

    def ranks(self, layout: Layout) -> list[RankMemory]:
        """Return the predicted memory of every pipeline rank under `layout`, in order."""
        stages, places = self.stages_of(layout), places_of(layout)
        return [
            self._rank(layout, rank, [stages[i][0] for i in places.stages_of(rank)])
            for rank in range(layout.pp)
        ]

    def most_memory(self, layout: Layout) -> float:
        """Return the predicted bytes of the pipeline rank that needs most memory under `layout`."""
        stages, places = self.stages_of(layout), places_of(layout)
        seen: set[Any] = set()
        most = 0.0
        for rank in range(layout.pp):
            mine = [stages[i][0] for i in places.stages_of(rank)]
            like = tuple(map(id, mine)) if layout.pipeline_order in CLOSED else rank
            if like not in seen:
                seen.add(like)
                most = max(most, self._rank(layout, rank, mine).total)
        return most

    def _rank(self, layout: Layout, rank: int, mine: list[StageMemory]) -> RankMemory:
        held = in_flight(layout.pipeline_order, layout.pp, layout.stages_per_rank,
                         layout.micro_batches, rank)  # fmt: skip
        found = rank_memory(mine, held, layout, self.precision, self.runtime, self.hardware)
        if not self.hardware.scratch:
            return found
        profile = self.profile_of(layout)
        uses = zip(profile.units, profile.uses(layout.rows), strict=True)
        scratch = self.hardware.scratch * max(use.output for unit, use in uses if unit.is_block)
        return replace(found, total=found.total + scratch, working=found.working + scratch)

    def on(self, hardware: Hardware, precision: str | None = None) -> "Planner":
        """Return a planner of the same model on other devices; both planners share the dry runs of the model.

        Args:
            hardware: profile of the devices.
            precision: another precision with the same bytes per element; None keeps this one.
        """
        other = copy.copy(self)
        other.hardware, other._stages = hardware, {}
        if precision is not None:
            other.precision = find_precision(precision)
        return other

    def how(self, layout: Layout) -> How:
        """Return what the seconds of work under `layout` depend on: hardware, runtime, precision, tp and cp."""
        runtime = self.runtime
        if layout.cp > 1 and runtime in (RUNTIMES["kernels"], RUNTIMES["compiled"]):
            runtime = RUNTIMES["eager"]  # cp runs without them
        return How(self.hardware, runtime, self.precision, layout.tp, layout.cp)

    def why(self, found: Forecasted) -> str:
        """Return a line that says why the layout of `found` does not fit: what its fullest rank needs, in GiB."""
        total = (found.memory + self.hardware.reserved) / GIB
        rank = found.ranks[found.fullest]
        sizes = {name: getattr(rank, name) for name in PARTS} | {"libraries": self.hardware.reserved}  # fmt: skip
        parts = ", ".join(f"{n} {x / GIB:.1f}" for n, x in sizes.items() if x / GIB >= 0.05)
        return (f"stage {found.fullest} needs {total:.1f} GiB of {self.hardware.memory / GIB:.1f}"
                f" ({parts})")  # fmt: skip

    def stages_of(self, layout: Layout) -> list[tuple[StageMemory, StageTime]]:
        """Return (memory, time) of every pipeline stage, in order; stages of equal cost share one object."""
        what = (layout.tp, layout.sequence_parallel, layout.cp, layout.cp_attention, layout.rows,
                layout.checkpoint_ratio, layout.checkpoint_policy)  # fmt: skip
        if (what, layout.stages) not in self._stages:
            profile, how = self.profile_of(layout), self.how(layout)
            again, marks, known = self._marks(what, profile, layout)
            found = self._stages[what, layout.stages] = []
            for a, b in itertools.pairwise(self.edges(layout.stages)):
                key = a > 0, b < len(marks), marks[a : b + 1]  # it sends what the next one receives
                if key not in known:
                    known[key] = (stage_memory(profile, a, b, layout.rows, again),
                                  stage_time(profile, a, b, layout.rows, again, how))  # fmt: skip
                found.append(known[key])
        return self._stages[what, layout.stages]

    def _marks(
        self, what: Any, profile: Profile, layout: Layout
    ) -> tuple[Recompute, tuple[int, ...], Any]:
        """Return (recompute policies under `layout`; an int (mark) per call of a block, embedding or head, in order; a
        dict in which the caller caches memory and time of stages by their marks).

        Calls with equal marks have equal costs. The result is cached under `what`, the fields of `layout` it depends
        on.
        """
        if what in self._stages:
            return self._stages[what]
        blocks, policy = self.family.blocks, layout.checkpoint_policy
        apart = (layout.tp - 1) / layout.tp * self.runtime.parts
        shares = 1 if layout.sequence_parallel else layout.tp
        if isinstance(policy, str):
            chosen = frozenset(blocks[i] for i in spread(len(blocks), layout.checkpoint_ratio))
            again = Recompute(chosen, policy, apart, shares=shares)
        else:
            each = dict(zip(blocks, policy, strict=True))
            again = Recompute(regathered=apart, each=each, shares=shares)
        tied = frozenset().union(*(names for _, names in profile.shared))
        like: dict[Any, int] = {}
        marks = tuple(
            like.setdefault((id(use), again.of(unit.name), unit.parameters,
                             unit.name if unit.name in tied else unit.is_block), len(like))
            for unit, use in zip(profile.units, profile.uses(layout.rows), strict=True)
        )  # fmt: skip
        self._stages[what] = again, marks, {}
        return self._stages[what]

    def edges(self, stages: int) -> list[int]:
        """Return the index of each stage's first call (of a block, embedding or head), then the number of all calls."""
        return [0, *self.cuts(stages), len(self.profile(1).units)]

    def costs(self) -> list[tuple[str, float]]:
        """Return (path, estimated operations) of each call of a block, embedding or head, by which stages are balanced."""
        if not self._costs:
            family = self.family
            config = copy.deepcopy(family.small)
            model = hf.build_on_meta(family.cls, config, torch.float32, family.table.seam)
            blocks = block_paths(Schedule(model, Mesh()), family.table)
            found = step_costs(model, units_of(model, family.table, blocks), blocks, 2)
            self._costs = family.repeat([(c.unit, c.step) for c in found])
        return self._costs

    def cuts(self, stages: int) -> list[int]:
        """Return the indices of the calls of modules (blocks, ...) before which the model is split into stages."""
        key = "cuts", stages
        if key not in self._stages:
            names, costs = zip(*self.costs(), strict=True)
            may_cut = [i for i, name in enumerate(names) if name in self.family.blocks]
            if self.runtime.even:
                costs = [float(name in self.family.blocks) for name in names]
            self._stages[key] = [i + 1 for i in balanced_cuts(costs, may_cut, stages)]
        return self._stages[key]
