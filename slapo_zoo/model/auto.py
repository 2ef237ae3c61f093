"""AutoScheduledModel: from a HuggingFace checkpoint or config to a model that trains on a mesh."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.hf import models as hf
from slapo_zoo.hf.attention_backends import require_backend
from slapo_zoo.cards.use import is_card, steps_for
from slapo_zoo.parallel.compat import new_group
from slapo_zoo.zoo.derive import is_auto, require_table
from slapo_zoo.model.dialects import check_target, in_target
from slapo_zoo.parallel.process_group import rank_guard
from slapo_zoo.errors import SlapoError
from slapo_zoo.zoo.kernel_choice import apply_kernels, device_name
from slapo_zoo.zoo.knobs import check_knobs
from slapo_zoo.zoo.arguments import (
    changed_config,
    checkpoint_dtype,
    local_folder,
    make_mesh,
    pick_device,
    to_dtype,
)
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.pipeline.runtime import Pipeline
from slapo_zoo.zoo.derived_check import probe
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.mixin import Runtime, scheduled_class
from slapo_zoo.pipeline.stages import keep_stages
from slapo_zoo.zoo.table import families
from slapo_zoo.weights.fill import fill_from_config, fill_from_folder
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.load import LoadOptions, parse_size


class AutoScheduledModel:
    """Builds scheduled models; not instantiated itself."""

    def __init__(self) -> None:
        hint = "call AutoScheduledModel.from_pretrained(...) or .from_config(...)"
        raise SlapoError("AutoScheduledModel", "()", "it has no instances", hint)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        tp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        sequence_parallel: bool = False,
        schedule: Any = "zoo",
        pipeline_order: str = "1f1b",
        stages_per_rank: int | None = None,
        auto_class: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        micro_batches: int | None = None,
        checkpoint_ratio: float = 0.0,
        checkpoint_policy: str = "",
        attention: str | None = None,
        kernels: str | Sequence[str] = "auto",
        seed: int | None = None,
        revision: str | None = None,
        allow_pickle: bool = False,
        max_load_memory: int | str | None = None,
        check_finite: bool = False,
        trust_remote_code: bool = False,
        verify: str = "quick",
        map_weights: bool = True,
        target: str | None = "torch",
        target_options: Mapping[str, Any] | None = None,
        **config_changes: Any,
    ) -> Any:
        """A model whose every rank has read only its own bytes of the checkpoint.

        Args:
            name_or_path: a folder, or a model id of the Hub.
            tp: ranks that divide each layer.
            pp: ranks that divide the layers into stages.
            dp: ranks that divide the batch; None takes all that are left.
            sequence_parallel: tp ranks divide the tokens too, where a layer is not divided.
            schedule: "zoo"; a card: a folder or "org/name@<sha>" of the Hub; a Schedule or its steps
                to replay; a function of the schedule; or "auto": "zoo", or for a family without a
                table one derived from the plan of `transformers`, used only after a tiny model on
                this mesh equals the plain one.
            pipeline_order: 1f1b, gpipe, interleaved_1f1b, looped_bfs, interleaved_zero_bubble,
                zbv or dualpipev; or a .csv file with an order of your own (see csv_order.py).
            stages_per_rank: of an interleaved order, from 2.
            auto_class: which head; None takes the checkpoint's own class.
            dtype: of the parameters; "auto" takes the checkpoint's.
            device: None takes this rank's GPU, or the CPU.
            micro_batches: default of `train_step`.
            checkpoint_ratio: share of the blocks whose activations are recomputed.
            checkpoint_policy: what those blocks keep: "" nothing, "save_matmuls" the results of
                matrix products.
            attention: back end: sdpa (default), eager, flash (the package flash-attn), flex or
                xformers; one that the family or the device cannot have is refused.
            kernels: fast paths: "auto" takes those that were measured not to lose on this device,
                "reference" none, a name or a list exactly these; `model.schedule.kernels` says why.
                A model that you compile as a whole is best loaded with "reference".
            seed: of dropout and of weights that the checkpoint lacks.
            revision: branch, tag or commit of the Hub.
            allow_pickle: read `.bin` files; they are pickles, refused otherwise.
            max_load_memory: most memory that this rank's weights may take, "8GB" or bytes: refused
                before anything is allocated.
            check_finite: warn about tensors that hold NaN or infinity.
            trust_remote_code: run the `schedule.py` of a card that is pinned to a sha.
            verify: "quick" refuses a card whose schedule is wrong on a small model of the family;
                "off" trusts it.
            map_weights: on the CPU, leave in the mapped files what lies there in one piece until
                `train()` copies it; False reads all of it now. The files must stay as they are
                meanwhile; replacing them by a rename, as every save of ours does, is no change.
            target: the engine that trains it: torch, deepspeed or megatron.
            target_options: of that engine, as `init_target_engine` takes them, e.g.
                `{"config": "ds.json", "optimizer": AdamW}`.
            config_changes: fields of the config to change, e.g. `num_labels=3`; no other names.

        Returns:
            for torch without options the model itself; else the engine, which has all that the
            model has, its `model` and `optimizer`, and `update(batch)` for a whole step.

        Raises:
            SlapoError: a knob of the wrong type, or an unknown one: the nearest names are told; an
                engine that does not exist, is not installed, or lacks an option.
        """
        given = locals()
        check_target("from_pretrained", target, target_options)
        mesh = make_mesh(tp, pp, dp)
        with rank_guard("from_pretrained"):
            check_knobs("from_pretrained", given)
            most = parse_size(max_load_memory, "max_load_memory")
            options, place = LoadOptions(most, check_finite, map_weights), pick_device(device)
            folder = local_folder(str(name_or_path), revision, allow_pickle)
            hf.register_models()
            config = changed_config(folder, config_changes)
            require_table(config, schedule)
            if is_auto(schedule) and config.model_type not in families():
                _verify_derived(config, auto_class, mesh, given)
            schedule = _steps(
                schedule, config, auto_class, mesh, pipeline_order, stages_per_rank,
                trust_remote_code, verify, kernels, device,
            )  # fmt: skip
            with open_checkpoint(folder, allow_pickle) as checkpoint:
                found = checkpoint_dtype(config, checkpoint) if dtype == "auto" else dtype
                build = _Build(
                    config, auto_class, mesh, to_dtype(found), seed, checkpoint_ratio,
                    sequence_parallel, pipeline_order, stages_per_rank, schedule,
                    checkpoint_policy, attention, kernels, place,
                )  # fmt: skip
                build.require_attention(attention, place)
                ledger = fill_from_folder(
                    build.model, lambda: build.skeleton, build.state, build.specs, checkpoint, mesh, place,
                    build.units, build.seed, build.keys, options,
                )  # fmt: skip
            return in_target(build.finish(ledger, micro_batches, folder), target, target_options)

    @classmethod
    def from_config(
        cls,
        config: Any,
        tp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        sequence_parallel: bool = False,
        schedule: Any = "zoo",
        pipeline_order: str = "1f1b",
        stages_per_rank: int | None = None,
        auto_class: Any = None,
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        micro_batches: int | None = None,
        checkpoint_ratio: float = 0.0,
        checkpoint_policy: str = "",
        attention: str | None = None,
        kernels: str | Sequence[str] = "auto",
        seed: int | None = None,
        trust_remote_code: bool = False,
        verify: str = "quick",
        target: str | None = "torch",
        target_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """A model with new weights, the same for every (tp, pp, dp); arguments as above."""
        given = locals()
        check_target("from_config", target, target_options)
        mesh = make_mesh(tp, pp, dp)
        with rank_guard("from_config"):
            check_knobs("from_config", given)
            require_table(config, schedule)
            if is_auto(schedule) and config.model_type not in families():
                _verify_derived(config, auto_class, mesh, given)
            schedule = _steps(
                schedule, config, auto_class, mesh, pipeline_order, stages_per_rank,
                trust_remote_code, verify, kernels, device,
            )  # fmt: skip
            dtype = torch.float32 if dtype == "auto" else to_dtype(dtype)
            place = pick_device(device)
            build = _Build(
                config, auto_class, mesh, dtype, seed, checkpoint_ratio, sequence_parallel,
                pipeline_order, stages_per_rank, schedule, checkpoint_policy, attention, kernels,
                place,
            )  # fmt: skip
            build.require_attention(attention, place)
            ledger = fill_from_config(
                build.model, lambda: build.skeleton, build.state, build.specs, mesh, place,
                build.units, build.seed,
            )  # fmt: skip
            return in_target(build.finish(ledger, micro_batches, None), target, target_options)


def _steps(
    schedule: Any, config: Any, auto_class: Any, mesh: Mesh, pipeline_order: str,
    stages_per_rank: int | None, trusted: bool, verify: str, kernels: Any, device: Any,
) -> Any:  # fmt: skip
    """What a schedule card does to this model on this mesh; any other schedule as it is.

    A card names no kernels that "auto" chose where it was made: they are chosen where it runs.
    """
    if not is_card(schedule):
        return schedule
    cls = hf.resolve_class(config, auto_class)
    stages = StageMap.make(pipeline_order, mesh.pp, stages_per_rank).num_stages
    knobs = {"pipeline_order": pipeline_order, "stages_per_rank": stages_per_rank}
    steps = steps_for(str(schedule), config, cls, mesh, stages, trusted, verify, **knobs)
    if callable(steps):  # a Python program that is trusted
        return steps
    late = next((i for i, (_, d) in enumerate(steps) if d.name in AFTER_KERNELS), len(steps))

    def program(sch: Schedule) -> None:
        sch.replay(steps[:late])
        if kernels == "auto":
            apply_kernels(sch, kernels, device_name(pick_device(device)))
        sch.replay(steps[late:])

    return program


def _verify_derived(config: Any, auto_class: Any, mesh: Mesh, given: Mapping[str, Any]) -> None:
    """Try a derived table on a tiny model of the family, on this mesh."""
    options = [given[name] for name in ("sequence_parallel", "pipeline_order", "stages_per_rank")]
    places = StageMap.make(options[1], mesh.pp, options[2])

    def build(small: Any) -> Any:
        place = pick_device(given["device"])
        made = _Build(
            small, auto_class, mesh, torch.float64, 0, 0.0, *options, "auto", "",
            given["attention"], given["kernels"], place,
        )  # fmt: skip
        ledger = fill_from_config(
            made.model, lambda: made.skeleton, made.state, made.specs, mesh, place, made.units, 0
        )
        return made.finish(ledger, None, None)

    probe(build, config, places.num_stages, mesh)


AFTER_KERNELS = ("checkpoint", "cut_pipeline_stage")


class _Build(Outline):
    """The outline with only this rank's stage left, ready to be filled."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.pipeline = None
        if self.mesh.pp > 1:
            mine = self.places.stages_of(self.mesh.coord("pp"))
            cursor = keep_stages(self.model, self.stages, mine)
            self.pipeline = Pipeline(self.schedule, self.cls, self.units, cursor, self.places)

    def require_attention(self, name: str | None, device: torch.device) -> None:
        """Refuse a back end that the family or the device cannot have."""
        if name is not None:
            found = self.table.tunable.get("attention", ())
            require_backend(name, self.cls, found, device, next(self.model.parameters()).dtype)

    def finish(self, ledger: Any, micro_batches: int | None, folder: Path | None) -> Any:
        """Make the class of the model a scheduled one."""
        model = self.model
        runtime = Runtime(
            schedule=self.schedule, specs=self.specs, own_forward=self.cls.forward,
            pipeline=self.pipeline, keys=self.keys, ledger=ledger,
            whole_batch=self.table.whole_batch, batch_statistics=self.table.batch_statistics,
            num_tokens=self._num_tokens(), micro_batches=micro_batches,
            source=folder,
        )  # fmt: skip
        runtime.ties, runtime.owned = self._ties()
        runtime.replicas = self._replicas()
        model.__class__ = scheduled_class(self.cls)
        model._slapo = runtime
        _take_generation_config(model, folder)
        return model

    def _num_tokens(self) -> int | None:
        count = self.table.num_tokens
        return count(self.model.config) if count else None

    def _ties(self) -> tuple[list[tuple[str, Any]], set[str]]:
        """Process groups of parameters that stages share, and the names this stage counts."""
        mine, ties = self.mesh.coord("pp"), []
        owned = {name for name, _ in self.model.named_parameters()}
        for stages, names in self.tied_ranks:
            group = _group_of_stages(self.mesh, stages)
            local = [name for name in names if name in owned]
            if mine in stages and local:
                ties.append((local[0], group))
                if mine != stages[0]:
                    owned -= set(local)
        return ties, owned

    def _replicas(self) -> list[tuple[str, Any]]:
        """Divided parameters that neighbouring tp ranks share (KV heads), and the group of those."""
        found, groups = [], {}
        for name, placed in sorted(self.state.placed.items()):
            placement, tp = placed.placement, self.mesh.tp
            units = placement.units(placed.shape[placement.axis])[0]
            if not placement.replicate or units >= tp:
                continue
            if units not in groups:
                groups[units] = _group_of_neighbours(self.mesh, tp // units)
            found.append((name, groups[units]))
        mine = {name for name, _ in self.model.named_parameters()}
        return [(name, group) for name, group in found if name in mine]


def _group_of_neighbours(mesh: Mesh, count: int) -> Any:
    """Our process group of `count` neighbouring tp ranks; a collective call of all ranks."""
    mine = None
    for first in range(0, mesh.world_size, count):
        ranks = list(range(first, first + count))  # tp is the fastest mesh dim
        group = new_group(ranks)
        mine = group if mesh.rank in ranks else mine
    return mine


def _group_of_stages(mesh: Mesh, stages: list[int]) -> Any:
    """Our process group over some stages; a collective call of all ranks."""
    if len(stages) == mesh.pp:
        return mesh.group("pp")
    mine = None
    for dp in range(mesh.dp):
        for tp in range(mesh.tp):
            ranks = [mesh.at(pp=stage, dp=dp, tp=tp) for stage in stages]
            group = new_group(ranks)
            mine = group if mesh.rank in ranks else mine
    return mine


def _take_generation_config(model: Any, folder: Path | None) -> None:
    """generation_config.json of the checkpoint."""
    from transformers import GenerationConfig

    if model.can_generate() and folder is not None and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
