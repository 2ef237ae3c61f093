"""Build a scheduled model on the meta device, keep this rank's pipeline stages, and fill them with weights from files
or with new ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import MeshError, WeightsError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.attention_backends import require_backend
from slapo_zoo.hf.cut_attention import follow_places
from slapo_zoo.model.context_parallel import (
    check_cp,
    require_core_attention,
    require_cp_support,
)
from slapo_zoo.model.dp.data_parallel import use_hooks
from slapo_zoo.model.dp.dp_shard import Shards, check_dp_shard, shard_over_dp
from slapo_zoo.model.missing_sums import warn_of_missing_sums
from slapo_zoo.model.mixin import Runtime, scheduled_class
from slapo_zoo.model.same_on_all import facts_of, require_same_facts, require_same_weights
from slapo_zoo.model.step.cut_batch import cut_batch
from slapo_zoo.model.step.mixed_precision import MixedPrecision, computing_forward
from slapo_zoo.model.step.parts import call_parts_alone
from slapo_zoo.parallel.compat import new_group, ranks_are_threads
from slapo_zoo.parallel.digests import digest
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.pipeline.pipeline_runtime import Pipeline
from slapo_zoo.pipeline.stages import keep_stages
from slapo_zoo.weights.fill import fill_from_config, fill_from_folder
from slapo_zoo.weights.folder import CheckpointFolder, open_checkpoint
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.load_rank_slices import LoadOptions, to_dtype
from slapo_zoo.weights.snapshot import read_by_all
from slapo_zoo.zoo.apply import block_paths
from slapo_zoo.zoo.argument_values import (
    changed_config,
    check_shared_gpu,
    checkpoint_dtype,
    local_folder,
    make_mesh,
    pick_device,
)
from slapo_zoo.zoo.hf_arguments import HubArguments
from slapo_zoo.zoo.options import MESH, BuildOptions, LoaderOptions, check_knobs, check_precision
from slapo_zoo.zoo.outline import Outline

Prepare = Callable[[LoaderOptions, Any, Mesh, torch.dtype], LoaderOptions]


class Assembly(Outline):
    """Builder of a scheduled model: made on meta, filled by `weights_of` or `new_weights`, returned by `finish`."""

    def __init__(
        self, config: Any, auto_class: Any, mesh: Mesh, dtype: torch.dtype, options: BuildOptions
    ):
        _refuse_dropped_layers(config, mesh)
        super().__init__(config, auto_class, mesh, dtype, options)
        if mesh.size("cp") > 1:
            require_cp_support(self.table, self.cls, self.model.config)
            require_core_attention(self.schedule, self.table)
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
        """Raise SlapoError if `attention=` names a backend that the model's family or the device does not support."""
        name, device = self.options.attention, self.options.place
        if name is not None:
            found = self.table.tries(self.cls).get("attention", ())
            dtype = self.state.compute_dtype or next(self.model.parameters()).dtype
            require_backend(name, self.cls, found, device, dtype)

    def weights_of(self, checkpoint: CheckpointFolder, load: LoadOptions) -> Ledger:
        """Read this rank's slices of a checkpoint into the model; return a record of tensors, bytes, files and seconds.
        `load` holds the memory limit and the checks of the load.
        """
        return fill_from_folder(
            self.model, lambda: self.skeleton, self.plan, checkpoint,
            self.options.place, self.units, self.seed, self.keys, load, self.shards,
        )  # fmt: skip

    def new_weights(self) -> Ledger:
        """Fill the model with new random weights, equal on every mesh; return a record of bytes and seconds."""
        return fill_from_config(
            self.model, lambda: self.skeleton, self.plan, self.options.place, self.units, self.seed, self.shards,
        )  # fmt: skip

    def require_same_weights(self, what: str) -> None:
        """Raise MeshError on all ranks if their schedules differ, or if replicas of a weight, on ranks that should hold
        the same values, differ in one of four elements spread over the weight. A collective call; `what` is the name of
        the running call ("from_pretrained"), for the error.
        """
        if self.pipeline is not None and ranks_are_threads():  # threads compute in a step
            self.pipeline.prepare()
        history = "\n".join(f"{path} {step}" for path, step in self.schedule.history)
        program = digest(history, self.plan.digest())
        tensors = dict(self.model.named_parameters())
        ranks = self.options.dp_shard
        require_same_weights(what, self.mesh, tensors, self.specs, program, ranks)

    def finish(self, ledger: Any, micro_batches: int | None, folder: Path | None) -> Any:
        """Set the class of the filled model, and its state `_slapo` (schedule, plan, ...); return the scheduled model.

        Args:
            ledger: record of the load (bytes, files, seconds).
            micro_batches: default number of micro-batches of `train_step`.
            folder: folder of the checkpoint; None for a model with new weights.
        """
        model = self.model
        warn_of_missing_sums(self.schedule)
        runtime = Runtime(
            self.schedule, computing_forward(self.cls.forward), self.table, self.pipeline, self.keys,
            ledger, micro_batches=micro_batches, source=folder and folder.absolute(),
        )  # fmt: skip
        is_fp16 = self.options.precision == "fp16"
        runtime.precision = MixedPrecision(self.state.compute_dtype, is_fp16)
        self.state.recomputing = runtime.precision.recomputing
        runtime.groups = _groups(self.plan)
        use_hooks(runtime)
        model.__class__ = scheduled_class(self.cls)
        model._slapo = runtime
        _take_generation_config(model, folder)
        return model

    def shard_and_hook(self, model: Any) -> None:
        """Finish `model`: shard parameters over dp (ZeRO) if `dp_shard=` is given, let users call submodules (an encoder)
        alone, and register the hooks that reduce gradients.
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
    """Create a process group for each set of ranks over which `plan` sums gradients; return this rank's {ranks: group}.
    All ranks must call this function.
    """
    made = {ranks: new_group(list(ranks)) for ranks in plan.groups()}
    return {ranks: group for ranks, group in made.items() if plan.mesh.rank in ranks}


def _take_generation_config(model: Any, folder: Path | None) -> None:
    """Give the model the generation config of the checkpoint in `folder`: generation_config.json, or the generation
    fields of config.json (older BART and T5), as `transformers` does; do nothing without these files.
    """
    from transformers import GenerationConfig

    if folder is None or not model.can_generate():
        return
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.exists():
            continue
        kind: dict[str, Any] = {"_from_model_config": True} if name == "config.json" else {}
        try:
            found = GenerationConfig.from_pretrained(folder, name, **kind)
        except (OSError, TypeError, ValueError) as error:
            problem = f"no generation config can be read: {str(error).strip().splitlines()[0]}"
            hint = f"correct this file{'' if kind else ', or remove it: config.json then holds'}"
            raise WeightsError(str(file), "", problem, hint) from error
        model.generation_config = found
        return


def _refuse_dropped_layers(config: Any, mesh: Mesh) -> None:
    """Raise MeshError if pp > 1 and the config has LayerDrop, which skips random blocks that other stages wait for."""
    for name, value in vars(config).items():
        if mesh.pp > 1 and name.endswith("layerdrop") and value:
            problem = f"the config has {name}={value}: stages would wait for the blocks that LayerDrop leaves out"
            what, hint = f"{name} with pp={mesh.pp}", f"pass {name}=0.0, or use pp=1"
            raise MeshError("from_pretrained", what, problem, hint)


@dataclass(frozen=True)
class Source:
    """Checkpoint to load from: where it is, and how it is read.

    Args:
        name: a folder, or a model id of the Hub.
        revision: branch, tag or commit of the Hub.
        allow_pickle: True reads `.bin` files too, which are pickles.
        changes: field of the config --> value that replaces the checkpoint's.
        hub: arguments of `from_pretrained` that say where files are and how they are read: token, subfolder, ...
        load: memory limit and checks of the load.
    """

    name: str
    revision: str | None = None
    allow_pickle: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    hub: HubArguments = field(default_factory=HubArguments)
    load: LoadOptions = field(default_factory=LoadOptions)

    def find(self) -> Path:
        """Return the local folder of the checkpoint; a model of the Hub is downloaded first."""
        return local_folder(self.name, self.revision, self.allow_pickle, self.hub)

    @contextmanager
    def open(self, step: str, mesh: Mesh, folder: Path) -> Iterator[tuple[Any, CheckpointFolder]]:
        """Context with (config, opened files) of the checkpoint in `folder`; a collective call of all ranks. Raises an
        error if ranks see different files. `step` is the name of the running call, for errors.
        """

        def read() -> tuple[Any, CheckpointFolder]:
            config = changed_config(folder, dict(self.changes), self.hub)
            return config, open_checkpoint(folder, self.allow_pickle, self.hub.stem).open_all()

        config, checkpoint = read_by_all(
            mesh, step, folder, read, lambda found: found[1].digest(), lambda found: found[1].close(),
        )  # fmt: skip
        with checkpoint:
            yield config, checkpoint


@contextmanager
def checked(step: str, options: LoaderOptions) -> Iterator[tuple[Mesh, LoaderOptions]]:
    """Context of a load: check those options that need no file, then yield (mesh, options to load with: device chosen,
    no Triton kernels if cp > 1). An error within the context is sent to the other ranks, which then raise one too.

    Args:
        step: name of the running call ("from_pretrained"), for errors.
        options: options that the user passed to the load.
    """
    mesh = make_mesh(**{name: getattr(options, name) for name in MESH})
    with rank_guard(step):
        check_knobs(step, options)
        options = replace(options, device=pick_device(options.device))
        check_precision(options.precision, options.dtype, options.place, options.target)
        check_shared_gpu(step, mesh, options.place)
        asked = options.zero_stage, options.target, options.target_options
        check_dp_shard(mesh, options.dp_shard, *asked)
        yield mesh, check_cp(step, mesh, options)


def load_checkpoint(
    step: str, options: LoaderOptions, source: Source, prepare: Prepare | None = None
) -> Any:
    """Load a checkpoint as a scheduled model, and return the model; each rank reads only its own bytes.

    Args:
        step: name of the running call ("from_pretrained"), for errors.
        options: options that the user passed to the load.
        source: the checkpoint.
        prepare: (options, config, mesh, dtype) --> options to build with, e.g. with a card (published schedule)
            replaced by its directives; None leaves the options unchanged.
    """
    with checked(step, options) as (mesh, options):
        folder = source.find()
        hf.register_models()
        with source.open(step, mesh, folder) as (config, checkpoint):

            def fill(build: Assembly) -> Any:
                build.keys = build.keys.as_in(checkpoint.key_to_file)
                return build.weights_of(checkpoint, source.load)

            stored = partial(checkpoint_dtype, config, checkpoint)
            return _build(step, options, mesh, config, stored, fill, folder, prepare)


def new_model(
    step: str, options: LoaderOptions, config: Any, prepare: Prepare | None = None
) -> Any:
    """Return a scheduled model with new random weights, equal for every (tp, pp, dp).

    Args:
        step: name of the running call ("from_config"), for errors.
        options: options that the user passed to the call.
        config: config of `transformers`.
        prepare: (options, config, mesh, dtype) --> options to build with; None leaves them unchanged.
    """
    with checked(step, options) as (mesh, options):
        fill = Assembly.new_weights
        return _build(step, options, mesh, config, lambda: torch.float32, fill, None, prepare)


def _build(
    step: str, options: LoaderOptions, mesh: Mesh, config: Any,
    stored: Callable[[], torch.dtype], fill: Callable[[Assembly], Any], folder: Path | None,
    prepare: Prepare | None,
) -> Any:  # fmt: skip
    """Build the scheduled model of a config, fill its parameters, and return the model.

    Args:
        step: name of the running call ("from_pretrained"), for errors.
        options: options of the user, already checked, with the device to load to.
        mesh: mesh of all ranks.
        config: config of `transformers`.
        stored: function that returns the dtype of the parameters for dtype="auto", e.g. the checkpoint's.
        fill: function that gives values to the parameters of the unfinished model, an Assembly; returns a load record.
        folder: folder of the checkpoint; None for a model with new weights.
        prepare: (options, config, mesh, dtype) --> options to build with; None leaves them unchanged.
    """
    require_same_facts(step, mesh, facts_of(config, mesh, options))
    asked = stored() if options.dtype == "auto" else options.dtype
    dtype = to_dtype(options.parameter_dtype(asked))
    options = prepare(options, config, mesh, dtype) if prepare else options
    build = Assembly(config, options.auto_class, mesh, dtype, options)
    build.require_attention()
    model = build.finish(fill(build), options.micro_batches, folder)
    build.require_same_weights(step)
    build.shard_and_hook(model)
    return model
