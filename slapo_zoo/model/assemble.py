"""Build a scheduled model: on the meta device first, then this rank's stages, process groups, weights and class."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import MeshError
from slapo_zoo.hf.attention_backends import require_backend
from slapo_zoo.hf.cut_attention import follow_places
from slapo_zoo.model.context_parallel import require_cp_support
from slapo_zoo.model.dp.data_parallel import use_hooks
from slapo_zoo.model.dp.dp_shard import Shards, shard_over_dp
from slapo_zoo.model.missing_sums import warn_of_missing_sums
from slapo_zoo.model.mixin import Runtime, scheduled_class
from slapo_zoo.model.same_on_all import require_same_weights
from slapo_zoo.model.step.cut_batch import cut_batch
from slapo_zoo.model.step.mixed_precision import MixedPrecision, computing_forward
from slapo_zoo.model.step.parts import call_parts_alone
from slapo_zoo.parallel.compat import new_group, ranks_are_threads
from slapo_zoo.parallel.digests import digest
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.pipeline.pipeline_runtime import Pipeline
from slapo_zoo.pipeline.stages import keep_stages
from slapo_zoo.weights.fill import fill_from_config, fill_from_folder
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.load import LoadOptions
from slapo_zoo.zoo.apply import block_paths
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.outline import Outline


class Assembly(Outline):
    """Model on the meta device that has only this rank's pipeline stages, before it is filled with weights."""

    def __init__(
        self, config: Any, auto_class: Any, mesh: Mesh, dtype: torch.dtype, options: BuildOptions
    ):
        _refuse_dropped_layers(config, mesh)
        super().__init__(config, auto_class, mesh, dtype, options)
        if mesh.size("cp") > 1:
            require_cp_support(self.table, self.cls, self.model.config)
            follow_places(self.state.modules, self.state.random, self.state.positions)
            if self.state.body is not None:
                self.state.body.shard = partial(cut_batch, self.model)
        self.pipeline = None
        if self.mesh.pp > 1:
            mine = self.places.stages_of(self.mesh.coord("pp"))
            cursor = keep_stages(self.model, self.stages, mine)
            self.pipeline = Pipeline(self.schedule, self.cls, self.units, cursor, self.places)

        self.shards = None
        if options.dp_shard > 1:
            self.shards = Shards.of(self.mesh, options.dp_shard, options.zero_stage)

    def require_attention(self) -> None:
        """Raise SlapoError for an attention backend that the family or the device does not support."""
        name, device = self.options.attention, torch.device(self.options.device)
        if name is not None:
            found = self.table.tunable.get("attention", ())
            dtype = self.state.compute_dtype or next(self.model.parameters()).dtype
            require_backend(name, self.cls, found, device, dtype)

    def weights_of(self, checkpoint: CheckpointFolder, load: LoadOptions) -> Ledger:
        """Read this rank's slices of a checkpoint into the model; return a record of bytes, files and seconds.

        `load` holds the memory limit and the checks of the load.
        """
        return fill_from_folder(
            self.model, lambda: self.skeleton, self.plan, checkpoint,
            torch.device(self.options.device), self.units, self.seed, self.keys, load, self.shards,
        )  # fmt: skip

    def new_weights(self) -> Ledger:
        """Fill the model with new weights, the same for every mesh; return a record of bytes and seconds."""
        place = torch.device(self.options.device)
        return fill_from_config(
            self.model, lambda: self.skeleton, self.plan, place, self.units, self.seed, self.shards,
        )  # fmt: skip

    def require_same_weights(self, what: str) -> None:
        """Raise MeshError if replicas of a weight, or the schedules, differ between ranks; a collective call.

        `what` names the load in the error.
        """
        if self.pipeline is not None and ranks_are_threads():  # threads compute in a step
            self.pipeline.prepare()
        history = "\n".join(f"{path} {step}" for path, step in self.schedule.history)
        program = digest(history, self.plan.digest())
        tensors = dict(self.model.named_parameters())
        ranks = self.options.dp_shard
        require_same_weights(what, self.mesh, tensors, self.specs, program, ranks)

    def finish(self, ledger: Any, micro_batches: int | None, folder: Path | None) -> Any:
        """Attach the runtime state to the filled model, change its class to that of a scheduled model, and return it.

        Args:
            ledger: record of the load.
            micro_batches: default number for `train_step`.
            folder: folder of the checkpoint, or None.
        """
        model = self.model
        warn_of_missing_sums(self.schedule)
        runtime = Runtime(
            self.schedule, computing_forward(self.cls.forward), self.table, self.pipeline, self.keys,
            ledger, micro_batches=micro_batches, source=folder,
        )  # fmt: skip
        runtime.precision = MixedPrecision(
            self.state.compute_dtype, self.options.precision == "fp16"
        )
        self.state.recomputing = runtime.precision.recomputing
        runtime.groups = _groups(self.plan)
        use_hooks(runtime)
        model.__class__ = scheduled_class(self.cls)
        model._slapo = runtime
        _take_generation_config(model, folder)
        return model

    def shard_and_hook(self, model: Any) -> None:
        """Shard parameters over dp if `dp_shard=` is given (ZeRO), let users call submodules (an encoder) outside the
        model's forward, and hook gradients.
        """
        blocks = block_paths(self.schedule, self.table)
        if self.shards is not None:
            shard_over_dp(model, blocks, self.shards)
        if self.pipeline is None:  # with a pipeline, calls of submodules raise
            self.state.index()
            divided = self.shards is not None or self.schedule.state.sequence_parallel
            call_parts_alone(model, blocks, blocks_too=divided)
        model._slapo.calls.prepare(model)


def _groups(plan: RankPlan) -> dict[tuple[int, ...], Any]:
    """Create a process group for each set of ranks that sums a gradient; return {ranks: group} of this rank's groups.

    All ranks must call this function.
    """
    made = {ranks: new_group(list(ranks)) for ranks in plan.groups()}
    return {ranks: group for ranks, group in made.items() if plan.mesh.rank in ranks}


def _take_generation_config(model: Any, folder: Path | None) -> None:
    """Load the generation_config.json of the checkpoint into the model, if there is one."""
    from transformers import GenerationConfig

    if model.can_generate() and folder is not None and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _refuse_dropped_layers(config: Any, mesh: Mesh) -> None:
    """Raise MeshError for LayerDrop with pp > 1: stages must know which blocks run."""
    for name, value in vars(config).items():
        if mesh.pp > 1 and name.endswith("layerdrop") and value:
            problem = f"found {value}, expected 0: stages would wait for the blocks that LayerDrop leaves out"
            raise MeshError(
                "from_pretrained",
                f"{name} with pp={mesh.pp}",
                problem,
                f"pass {name}=0.0, or use pp=1",
            )
