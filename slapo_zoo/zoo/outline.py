"""Outline of a scheduled model: a copy on the meta device, which tells shapes, sharding and pipeline stages."""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from slapo_zoo.errors import MeshError, ScheduleError, SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.hf.cut_body import Body
from slapo_zoo.hf.cut_ulysses import require_heads
from slapo_zoo.hf.example_inputs import example_shard
from slapo_zoo.language.directive import State
from slapo_zoo.language.planned_rows import planned_rows
from slapo_zoo.language.primitives import CoreAttentionSeam, ForkRng
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.pipeline.stages import assign_stages, stages_of
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.zoo.apply import apply_table, block_paths, units_of
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.schedule_source import FROM_TABLE, find_table, kind_of
from slapo_zoo.zoo.table import base_prefix
from slapo_zoo.zoo.tuned import tuned_knobs

DEFAULT = BuildOptions()
DRAWING = (ForkRng, CoreAttentionSeam)  # directives after which draws depend on a module's path


class Outline:
    """Model on the meta device, scheduled for one rank of a mesh, with the sharding of its tensors and its stages.

    Args:
        config: a config of `transformers`; it is not changed.
        auto_class: auto class or model class, which selects the head; None takes the class that the config names.
        mesh: sizes of the mesh dims, and the rank for which the model is scheduled; no process group is needed.
        dtype: dtype of the parameters.
        options: arguments of `from_pretrained` that change how the model runs, e.g. those of another model.
        changes: single arguments that replace those in `options`, e.g. checkpoint_ratio=1.0.
    """

    def __init__(
        self,
        config: Any,
        auto_class: Any,
        mesh: Mesh,
        dtype: torch.dtype,
        options: BuildOptions = DEFAULT,
        **changes: Any,
    ):
        self.options = options = options.but(**changes)
        self.mesh, self.seed = mesh, options.seed or 0
        self._config, self._dtype = config, dtype
        config = copy.deepcopy(config)
        self.cls: Any = hf.resolve_class(config, auto_class)
        self.table, kind = find_table(config, options.schedule), kind_of(options.schedule)
        self.keys = KeyMap(self.table.renames, self.table.pieces)
        self.model = hf.build_on_meta(self.cls, config, dtype, self.table.seam)
        whole = {name: _spec(name, tensor) for name, tensor in self.model.state_dict().items()}
        self.schedule = Schedule(self.model, mesh, self.seed)
        self.state: State = self.schedule.state
        self.state.compute_dtype = options.compute_dtype
        if mesh.cp > 1:
            self.state.positions = self.table.positions_of(self.cls) or ""
            self.state.cp_attention = options.cp_attention
        self.places = StageMap.make(options.pipeline_order, mesh.pp, options.stages_per_rank)
        if kind in FROM_TABLE:
            computes, is_auto = options.compute_dtype or dtype, options.kernels == "auto"
            tuned = tuned_knobs(config, computes, options.place) if is_auto else {}
            chosen = options.but(attention=options.attention or tuned.get("attention"))
            stages = self.places.num_stages
            apply_table(self.schedule, self.table, chosen, stages, tuned.get("kernels"))
            if kind == "extended":
                options.schedule.function(self.schedule)
        else:
            _refuse_knobs(options)
            self._apply(options)
        if mesh.cp > 1:
            require_cp_attention(self.state.modules, mesh.cp, options.cp_attention)
        blocks = block_paths(self.schedule, self.table)
        self.units = units_of(self.model, self.table, blocks)
        if self.state.positions and not head_of(self.cls.__name__).by_token:
            base = base_prefix(self.model).rstrip(".")
            shard = example_shard(self.model, self.state.positions)
            self.state.body = Body(self.model, base, blocks, self.state.random, shard)
        repeated = blocks if self.table.calls else ()  # a cut may lie after the first of its calls
        held = [base_prefix(self.model) + path for path in self.table.everywhere]
        self.stages = assign_stages(self.units, self.state.cuts, repeated, held)
        self.holders = {unit: self._ranks(stages) for unit, stages in self.stages.items()}
        self.plan = self.state.plan = self._plan(whole)
        self.specs = self.plan.saved

    def _plan(self, whole: dict[str, TensorSpec]) -> RankPlan:
        """Return how each tensor is sharded and its gradient summed; `whole` is {name: its unsharded shape, dtype}."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        if added := sorted(parameters - whole.keys()):
            problem = "a directive added this parameter, for which neither checkpoints nor the config have values"
            hint = "replace modules by ones with the same parameters, or use create_schedule(model): it takes any module"
            raise ScheduleError(added[0], "schedule", problem, hint)
        rows = planned_rows(
            self.state, whole, parameters, hf.tied_names(self.model),
            lambda name: stages_of(name, self.holders), self.options.dp_shard,
        )  # fmt: skip
        here = self.mesh.coord("pp")
        units = tuple(unit for unit, ranks in self.holders.items() if here in ranks)
        cuts = tuple(f"{path}, call {call}" if call else path for path, call in self.state.cuts)
        steps = zip(self.schedule.landed, self.schedule.history, strict=True)
        sites = {
            path: str(directive)
            for paths, (_, directive) in steps if isinstance(directive, DRAWING)
            for path in paths if here in stages_of(path, self.holders)
        }  # fmt: skip
        return RankPlan(self.mesh, rows, units, cuts, sites)

    @cached_property
    def skeleton(self) -> Any:
        """Return the unsharded model on meta, without a schedule and with all stages; it is built on first use."""
        config = copy.deepcopy(self._config)
        return hf.build_on_meta(self.cls, config, self._dtype, self.table.seam)

    def _apply(self, options: BuildOptions) -> None:
        """Apply the user's schedule, `options.schedule`; MeshError if its cuts make not as many stages as pp needs."""
        schedule = options.schedule
        if kind_of(schedule) in ("card", "function"):
            schedule(self.schedule)
        else:
            self.schedule.replay(schedule if isinstance(schedule, Schedule) else list(schedule))
        found, wanted = len(self.state.cuts) + 1, self.places.num_stages
        if found != wanted:
            problem = f"found {found} pipeline stages, pp and pipeline_order need {wanted}"
            hint = f"use cut_pipeline_stage() {wanted - 1} times in the schedule"
            raise MeshError("from_pretrained", "schedule", problem, hint)

    def _ranks(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the pp coordinates of the ranks that run `stages`, without repeats, in the order of the stages."""
        return tuple(dict.fromkeys(self.places.rank_of(stage) for stage in stages))


def _refuse_knobs(options: BuildOptions) -> None:
    """Raise SlapoError for an option, e.g. `kernels`, that has no effect beside a schedule of the user's own."""
    for name in (
        "checkpoint_ratio",
        "sequence_parallel",
        "checkpoint_policy",
        "attention",
        "kernels",
    ):
        value = getattr(options, name)
        if value and value not in ("auto", "reference"):
            problem = "your own schedule decides this option"
            hint = f'leave {name}= out and express it in your schedule, or use schedule="zoo"'
            raise SlapoError("from_pretrained", f"{name}={value!r}", problem, hint)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def require_cp_attention(modules: Mapping[str, Any], n: int, way: str) -> None:
    """Raise MeshError if `way` is "ulysses" and n does not divide the number of heads of some attention on this rank,
    or if it is "ring" and an attention module (GPT-Neo, GPT-J) computes the scores of all keys at once.

    Args:
        modules: path --> module of a model.
        n: number of cp ranks.
        way: how attention sees the tokens of all cp ranks: "gather", "ulysses" or "ring".
    """
    own = {path: m for path, m in modules.items() if hasattr(m, "_attn")}
    if way == "ring" and own:
        problem = "this attention computes its own scores, of all keys at once"
        raise MeshError(next(iter(own)), 'cp_attention="ring"', problem, 'use cp_attention="gather" or "ulysses"')  # fmt: skip
    counts = {p: len(m.heads) for p, m in modules.items() if isinstance(m, CoreAttention) and m.heads}  # fmt: skip
    counts |= {path: getattr(m, "num_heads", None) or m.num_attention_heads for path, m in own.items()}  # fmt: skip
    for path, count in counts.items() if way == "ulysses" else ():
        require_heads(path, count, n)
