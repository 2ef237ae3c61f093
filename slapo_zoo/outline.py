"""A model on meta, scheduled for one rank of a mesh: which tensors there are, and where."""

import copy
from typing import Any

import torch

from slapo_zoo import hf
from slapo_zoo.directive import State
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.mesh import Mesh
from slapo_zoo.orders import StageMap
from slapo_zoo.placement import TensorSpec
from slapo_zoo.schedule import Schedule
from slapo_zoo.stages import assign_stages, leaf_units, stages_of
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.zoo import apply_table, base_prefix, block_paths, table_for


class Outline:
    """A model on meta, scheduled for one rank of a mesh: which tensors there are, and where.

    Args:
        config: of `transformers`; it is not changed.
        auto_class: which head; None takes the config's own class.
        mesh: need not have a process group.
        dtype: of the parameters.
        seed: of dropout and of new weights.
        checkpoint_ratio: share of the blocks whose activations are recomputed.
        sequence_parallel: tp ranks divide the tokens too.
        pipeline_order: how the stages interleave micro-batches.
        stages_per_rank: for interleaved orders.
        schedule: "zoo", a Schedule or its steps to replay, or a function of the schedule.
    """

    def __init__(
        self, config: Any, auto_class: Any, mesh: Mesh, dtype: torch.dtype, seed: int | None = None,
        checkpoint_ratio: float = 0.0, sequence_parallel: bool = False,
        pipeline_order: str = "1f1b", stages_per_rank: int | None = None, schedule: Any = "zoo",
    ):  # fmt: skip
        self.mesh, self.seed = mesh, 0 if seed is None else seed
        config = copy.deepcopy(config)
        self.cls: Any = hf.resolve_class(config, auto_class)
        self.table = table_for(config.model_type)
        self.keys = KeyMap(self.table.renames, self.table.pieces)
        self.skeleton = hf.build_on_meta(self.cls, config, dtype, self.table.seam)
        self.model = hf.build_on_meta(self.cls, config, dtype, self.table.seam)
        self.schedule = Schedule(self.model, mesh, self.seed)
        self.state: State = self.schedule.state
        self.places = StageMap.make(pipeline_order, mesh.pp, stages_per_rank)
        if schedule == "zoo":
            stages = self.places.num_stages
            apply_table(self.schedule, self.table, checkpoint_ratio, sequence_parallel, stages)
        else:
            self._apply(schedule)
        late = [base_prefix(self.model) + path for path in self.table.after_blocks]
        self.units = leaf_units(self.model, block_paths(self.schedule, self.table), late)
        self.stages = assign_stages(self.units, self.state.cuts)
        self.holders = {unit: self._ranks(stages) for unit, stages in self.stages.items()}
        self.specs = tensor_specs(self.skeleton, self.state, self.holders)
        self.tied_ranks = _tied_ranks(self.state, self.holders)

    def _apply(self, schedule: Any) -> None:
        """A program of the user's own in place of the table."""
        if isinstance(schedule, Schedule | list | tuple):
            self.schedule.replay(schedule if isinstance(schedule, Schedule) else list(schedule))
        elif callable(schedule):
            schedule(self.schedule)
        else:
            problem = f"found {schedule!r}"
            hint = 'pass "zoo", a Schedule, its steps, or a function of the schedule'
            raise SlapoError("from_pretrained", "schedule", problem, hint)
        found, wanted = len(self.state.cuts) + 1, self.places.num_stages
        if found != wanted:
            problem = f"the schedule has {found} stages, the mesh and order need {wanted}"
            hint = f"use cut_pipeline_stage() {wanted - 1} times"
            raise MeshError("from_pretrained", "schedule", problem, hint)

    def _ranks(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """The pp coordinates that hold stages, without repetition, first stage first."""
        return tuple(dict.fromkeys(self.places.rank_of(stage) for stage in stages))


def _tied_ranks(
    state: State, stages: dict[str, tuple[int, ...]]
) -> list[tuple[list[int], list[str]]]:
    """Parameters that several stages hold: (stages, names)."""
    found = []
    for names in state.owners.values():
        holders = sorted({stage for name in names for stage in stages_of(name, stages)})
        if len(holders) > 1:
            found.append((holders, names))
    return found


def tensor_specs(
    skeleton: Any, state: State, stages: dict[str, tuple[int, ...]]
) -> list[TensorSpec]:
    """Every tensor that the model's checkpoint holds, in the order of its state dict."""
    tied = hf.tied_names(skeleton)
    specs = []
    for name, tensor in skeleton.state_dict().items():
        if name in tied:
            continue
        placed = state.placed.get(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        placement = placed.placement if placed else None
        stage = stages_of(name, stages)[0]
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, placement, stage))
    return specs
