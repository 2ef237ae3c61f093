"""LoRA adapters of peft on a sharded model: each LoRA matrix, A or B, is sharded like the weight W that it adapts.

A layer computes y = W x + s B A x, with h = A x of r features:
    W column-parallel   B is sharded as W along its outputs, A replicated; the gradient of h or of A is all-reduced
    W row-parallel      A is sharded as W along its inputs, and h is all-reduced as y is; B is replicated
    W replicated        A and B are replicated

On one process every option of LoraConfig works, also those that train other tensors (`modules_to_save`, DoRA, biases).
source:  Hu et al. 2021, LoRA, arXiv:2106.09685; Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053
"""

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError, agreed
from slapo_zoo.language.directive import Directive, Placed, Site, State
from slapo_zoo.language.planned_rows import plan_of, planned_rows
from slapo_zoo.language.primitives import ForkRng, Shard, SumGradient, Sync
from slapo_zoo.model.gradients.module_changes import own_name
from slapo_zoo.parallel import gather as consolidate
from slapo_zoo.parallel.local_tensors import Rows, rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.paths import select
from slapo_zoo.parallel.placement import Placement, TensorSpec
from slapo_zoo.parallel.rank_plan import PARTIAL, TIED
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.rng.device_seeds import mix
from slapo_zoo.parallel.stand_ins import standing_in
from slapo_zoo.pipeline.stages import held_here
from slapo_zoo.weights.adapter_files import open_adapter
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import load_tensors

STEP = "add_adapter"
PREFIX = "base_model.model."  # of the keys in the files of peft
INPUT_AXIS = {"Linear": 1, "Conv1D": 0}  # of the base weight
INITS = (True, False, "gaussian")
# Options that need the unsharded weight, or train more than LoRA's matrices --> values that shards allow.
PLAIN = {"bias": ("none",), "init_lora_weights": INITS} | dict.fromkeys(
    ("lora_bias", "modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices"), ()
)  # fmt: skip


@dataclass(frozen=True)
class Matrix:
    """One LoRA matrix (A or B) of one layer, and how it is sharded.

    Args:
        key: key in peft's adapter_model.safetensors.
        parameter: name of the parameter in the scheduled model.
        shape: unsharded shape.
        directives: changes that a schedule makes (`Shard`, `SumGradient`, `Sync`), to shard this matrix.
    """

    key: str
    parameter: str
    shape: tuple[int, int]
    directives: tuple[Directive, ...]


def add_adapter(
    model: Any, config: Any, name: str, inject: Callable[[], None], folder: Path | None = None
) -> None:
    """Add a LoRA adapter: peft inserts its layers, then each rank gets its shards of new or saved matrices.

    Args:
        model: a scheduled model.
        config: a LoraConfig, the same on every rank.
        name: name of the adapter.
        inject: function without arguments that lets peft insert its layers into the model.
        folder: folder of an adapter that peft or `save_adapter` wrote; None draws new values, the same on every mesh.
    """
    together(model.mesh, STEP, lambda: _check_config(model, config))
    matrices: list[Matrix] = []
    with _undone_on_error(model, name), unsharded_shapes(model), held_here(model):
        _inject(model, inject)
        together(model.mesh, STEP, lambda: matrices.extend(_matrices(model, name)))
        own = config.target_modules, [m.parameter.partition(".lora_")[0] for m in matrices]
        targets = together(model.mesh, STEP, lambda: own)
        if any(one != own[0] for one, _ in targets):  # peft's "all-linear" names those of a stage
            config.target_modules = {path for _, paths in targets for path in paths}
        values = _trained_tensors(model, name) | _drawn(model, config, matrices)
        wanted = {key for keys in together(model.mesh, STEP, lambda: list(values)) for key in keys}
        if folder is not None:
            together(model.mesh, STEP, lambda: _read(folder, values, wanted))
    for matrix in matrices:
        _place(model, matrix, values[matrix.key])
    _fit_layers(model, name)
    rows = model._slapo.plan.tensors
    model._slapo.adapters[name] = [replace(rows[m.parameter], name=m.key) for m in matrices]


def _inject(model: Any, inject: Callable[[], None]) -> None:
    """Call `inject`, which inserts peft's layers; SlapoError on all ranks if a stage has no target module of LoRA."""
    from peft.utils.error import NoMatchingPeftModuleError

    def attempt() -> tuple[int, str]:
        try:
            inject()
        except NoMatchingPeftModuleError as error:
            return model.mesh.coord("pp"), str(error)
        return model.mesh.coord("pp"), ""

    if missing := {stage: text for stage, text in together(model.mesh, STEP, attempt) if text}:
        found = f"no module with these names on stages {sorted(missing)} of pp={model.mesh.pp}"
        problem = found if len(missing) < model.mesh.pp else missing[0]
        hint = "name modules that every stage has, or use a smaller pp; print(model) shows names"
        raise agreed(SlapoError(STEP, "target_modules", problem, hint))


def _trained_tensors(model: Any, name: str, grads: bool = False) -> dict[str, Tensor]:
    """Return {key in peft's files: tensor or, if `grads`, gradient} of LoRA's matrices and all else that adapter `name`
    trains (`modules_to_save`), on a mesh of one rank. On several ranks, which allow LoRA's matrices only, return {}.
    """
    from peft import get_peft_model_state_dict

    if model.mesh.world_size > 1:
        return {}
    named = model.named_parameters() if grads else ()
    held = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named} or None
    found = get_peft_model_state_dict(model, held, name, save_embedding_layers=False)
    return {PREFIX + key: tensor for key, tensor in found.items()}


def consolidated_adapter(model: Any, name: str, grads: bool = False) -> dict[str, Tensor]:
    """Return {key in peft's files: unsharded tensor of adapter `name` or, if `grads`, its gradient (zeros if missing)}
    on rank 0, and {} on other ranks; a collective call.
    """
    if name not in model._slapo.adapters:
        known = ", ".join(model._slapo.adapters) or "none"
        hint = "name one of these, or call model.add_adapter(config) first"
        raise SlapoError("adapter", repr(name), f"no such adapter; the model has {known}", hint)
    if whole := _trained_tensors(model, name, grads):
        return {
            key: tensor.detach().clone(memory_format=torch.contiguous_format)
            for key, tensor in whole.items()
        }
    own = model._slapo.adapters[name]
    of_stages = together(model.mesh, "adapter", lambda: own)
    specs = list({spec.name: spec for specs in of_stages for spec in specs}.values())
    local = {spec.name: model.get_parameter(parameter_of(spec.name, name)) for spec in own}
    if grads:
        local = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in local.items()}
    return consolidate.gather({k: t.detach() for k, t in local.items()}, specs, model.mesh)


@contextmanager
def unsharded_shapes(model: Any) -> Iterator[None]:
    """Context for peft in which each parameter that ZeRO shards is replaced by a placeholder of its unsharded shape."""
    plan = model._slapo.plan
    shown = [
        (module, leaf, p.new_empty(1).expand(plan.local_shape(own_name(f"{path}.{leaf}"))))
        for path, module in model.named_modules()
        for leaf, p in module._parameters.items() if p is not None and rows_of(p) is not None
    ]  # fmt: skip
    with standing_in(shown):
        yield


def parameter_of(key: str, name: str) -> str:
    """Return the name in the model of a LoRA matrix, given its `key` in peft's files and the `name` of the adapter."""
    return key.removeprefix(PREFIX).removesuffix(".weight") + f".{name}.weight"


def _check_config(model: Any, config: Any) -> None:
    """Raise SlapoError unless `config` is a LoraConfig and, on several ranks, one that trains LoRA's matrices alone."""
    from peft import LoraConfig

    hint = (
        "use LoraConfig(r=..., lora_alpha=..., target_modules=[...], lora_dropout=...); or train the adapter "
        "on one process with plain peft, merge it (merge_and_unload), save the model and load its folder"
    )
    if not isinstance(config, LoraConfig):
        problem = f"found {type(config).__name__}, expected a LoraConfig"
        raise SlapoError(STEP, "adapter_config", problem, hint)
    variants = [
        one.name for one in fields(config) if one.metadata.get("is_lora_variant")
    ]  # DoRA, ...
    refused = dict.fromkeys(variants, ()) | PLAIN
    refused = {"layer_replication": ()} if model.mesh.world_size == 1 else refused
    strange = [f"{k}={v!r}" for k, plain in refused.items()
               if (v := getattr(config, k, None)) and v not in plain]  # fmt: skip
    if strange:
        problem = f"not supported on a sharded model: {', '.join(strange)}"
        raise SlapoError(STEP, "adapter_config", problem, hint)


@contextmanager
def _undone_on_error(model: Any, name: str) -> Iterator[None]:
    """Context of adding the adapter `name`; an error removes its layers and restores each parameter's `requires_grad`."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    trained = {id(p): p.requires_grad for p in model.parameters()}
    was_loaded = model._hf_peft_config_loaded
    try:
        yield
    except BaseException:
        if was_loaded:
            if name in model.peft_config:
                model.delete_adapter(name)
        else:
            for path, module in list(model.named_modules()):
                parent, _, leaf = path.rpartition(".")
                if isinstance(module, BaseTunerLayer):
                    setattr(model.get_submodule(parent), leaf, module.get_base_layer())
                elif isinstance(module, AuxiliaryTrainingWrapper):
                    setattr(model.get_submodule(parent), leaf, module.original_module)
            model._hf_peft_config_loaded, model._slapo.peft_config = False, None
        for p in model.parameters():
            p.requires_grad_(trained.get(id(p), False))  # False: of the adapter that was removed
        raise


def _layers(model: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path in the model, peft's LoRA layer) of every layer that the adapter `name` adapts."""
    from peft.tuners.lora import LoraLayer

    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and name in module.r:
            yield path, module


def _matrices(model: Any, name: str) -> list[Matrix]:
    """Return matrices A and B of every layer of adapter `name`; SlapoError for a layer that cannot be sharded."""
    state: State = model.schedule.state
    found = []
    for path, layer in _layers(model, name):
        base, rank = layer.get_base_layer(), layer.r[name]
        kind = next((c.__name__ for c in type(base).__mro__ if c.__name__ in INPUT_AXIS), "")
        if not kind and model.mesh.world_size == 1:
            continue  # an embedding, or experts: peft has made its matrices, which nothing shards
        if not kind:
            raise _refusal(path, f"found a {type(base).__name__}, expected a Linear or Conv1D")
        placed, axis = state.placed.get(f"{path}.weight"), INPUT_AXIS[kind]
        row = state.plan.of(f"{path}.weight") if state.plan else None
        if row is not None and row.sums(True, TIED):
            problem = "an adapter of a weight that several pipeline stages share is not supported"
            raise _refusal(path, problem)
        shape = placed.shape if placed else tuple(base.weight.shape)
        of_a, of_b = _rule(path, state, placed, axis, _syncs(model, path))
        _check_dropout(path, layer.lora_dropout[name], of_a, shape[axis], model.mesh)
        for letter, size, directives in (
            ("A", (rank, shape[axis]), of_a),
            ("B", (shape[1 - axis], rank), of_b),
        ):
            parameter = f"{path}.lora_{letter}.{name}.weight"
            key = PREFIX + parameter.replace(f".{name}.weight", ".weight")
            found.append(Matrix(key, parameter, size, directives))
    return found


def _refusal(path: str, problem: str, change: str = "") -> SlapoError:
    hint = "leave this module out of target_modules; projections of attention and feed-forward can have adapters"
    return SlapoError(STEP, path, problem, change + hint)


def _syncs(model: Any, path: str) -> list[Sync]:
    """Return the `sync` directives of the model's schedule at the module `path`: collectives before or after the module."""
    schedule = model.schedule
    names = {path: type(schedule.state.modules[path]).__name__}
    return [step for pattern, step in schedule.history
            if isinstance(step, Sync) and select(pattern, names)]  # fmt: skip


def _rule(
    path: str, state: State, placed: Placed | None, input_axis: int, syncs: list[Sync]
) -> tuple[tuple[Directive, ...], tuple[Directive, ...]]:
    """Return (directives for LoRA's matrix A, directives for B) of the layer at `path`: they shard A and B as tp shards
    the layer's weight, and add the same collectives and gradient sums; () and () for tp=1. `state` is the schedule's.
    `placed` is the weight's sharding over tp (None: not sharded), `input_axis` its axis of input features, `syncs` are
    the collectives at the layer. SlapoError for a padded vocabulary, or collectives other than the all-reduce needed.
    """
    if state.mesh.tp == 1:
        return (), ()
    if placed is None:
        row = plan_of(state).of(f"{path}.weight")
        kinds = [one.if_tokens_sharded for one in row.sums(True, PARTIAL)] if row else []
        sums = tuple(SumGradient("weight", sequence=tokens) for tokens in kinds)
        return sums, sums
    if placed.placement.pad:
        problem = "the module's weight is sharded over a padded vocabulary, where adapters are not supported"
        raise _refusal(path, problem)
    if other := [s.sync_op_or_fn for s in syncs if s.sync_op_or_fn != "all_reduce"]:
        problem = f"the schedule has sync(..., {other[0]!r}) at this module, expected 'all_reduce'"
        raise _refusal(path, problem)
    how = placed.directive
    assert isinstance(how, Shard)  # noqa: S101 - no other directive shards tensors
    mode = "bwd_post" if placed.placement.axis != input_axis else "fwd_post"
    here = [replace(s, shared=False) for s in syncs if s.mode == mode]
    in_tokens = (SumGradient("weight", sequence=True),)
    tokens = in_tokens if any(s.sequence_axis is not None for s in here) else ()
    if mode == "bwd_post":
        part = replace(how, axis=0)
        # Without an all-reduce in `here` the gradient of h is a partial sum, so that of A is summed.
        return tokens if here else (SumGradient("weight"),), (part, *here)
    if not here:
        problem = "the weight is sharded over inputs, but the schedule does not all-reduce the module's output"
        change = 'add sync("fwd_post", "all_reduce") at this module to the schedule, or '
        raise _refusal(path, problem, change)
    return (replace(how, axis=1), *here), tokens


def _check_dropout(
    path: str, dropout: nn.Module, of_a: tuple[Directive, ...], size: int, mesh: Mesh
) -> None:
    """Raise SlapoError if tp shards the input features of LoRA's `dropout` unequally, since each rank draws an equal
    slice of a mask. `path` is the layer's, `size` the number of input features of the unsharded layer, `of_a` are the
    directives (changes of the schedule) that shard matrix A.
    """
    placements = [one.placement for one in of_a if isinstance(one, Shard)]
    if isinstance(dropout, nn.Dropout) and any(
        p.runs(size, mesh.tp, r) != Placement(0).runs(size, mesh.tp, r)
        for p in placements for r in range(mesh.tp)
    ):  # fmt: skip
        problem = f"tp={mesh.tp} shards the {size} inputs of lora_dropout into unequal parts"
        raise SlapoError(STEP, path, problem, "pass lora_dropout=0.0, or use another tp")


def _drawn(model: Any, config: Any, matrices: list[Matrix]) -> dict[str, Tensor]:
    """Return {key in peft's files: new unsharded matrix} of `matrices`, drawn from the distribution in peft's `config`.

    Each matrix is drawn from its own generator, which makes it equal on every mesh. If peft has computed the values
    from the weights (PiSSA, on one process), the model's own tensors are returned.
    """
    values = {}
    if config.init_lora_weights not in INITS:
        return {m.key: model.get_parameter(m.parameter).detach() for m in matrices}
    seed = model.schedule.state.random.seed
    for matrix in matrices:
        values[matrix.key] = full = torch.zeros(matrix.shape)
        own = torch.Generator().manual_seed(mix(seed, zlib.crc32(matrix.key.encode())))
        if ".lora_A." in matrix.key and config.init_lora_weights == "gaussian":
            full.normal_(std=1 / matrix.shape[0], generator=own)
        elif ".lora_A." in matrix.key or config.init_lora_weights is False:
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=own)
    return values


def _read(folder: Path, values: dict[str, Tensor], wanted: set[str]) -> None:
    """Fill this stage's `values` (by key) from the files in `folder`; SlapoError if `wanted` lacks a key of a file."""
    with open_adapter(folder) as files:
        if unknown := sorted(set(files.key_to_file) - wanted):
            problem = f"found {len(unknown)} tensors that the model does not have: {unknown[:3]}"
            hint = "load an adapter that was saved for this model class and number of blocks"
            raise SlapoError(str(folder), "adapter", problem, hint)
        targets = {key: Target(value, tuple(value.shape)) for key, value in values.items()}
        load_tensors(targets, files, {key: key for key in targets}, Mesh())


def _place(model: Any, matrix: Matrix, value: Tensor) -> None:
    """Put `value` (unsharded LoRA matrix A [r, I] or B [O, r]) into its module, and shard it. The matrix is also added
    to the model's plan: the table of each tensor's sharding and gradient sums.
    """
    state: State = model.schedule.state
    path = matrix.parameter.removesuffix(".weight")
    module = model.get_submodule(path)
    old = module.weight
    module.weight = nn.Parameter(value.to(old), old.requires_grad)
    state.modules[path] = module
    state.owners[id(module.weight)] = [matrix.parameter]
    site = Site(path, module, state)
    for directive in matrix.directives:  # in order: SumGradient checks what Shard did
        directive.check(site)
        directive.apply(site)
    name, stage = matrix.parameter, (model.mesh.coord("pp"),)
    spec = TensorSpec(name, tuple(matrix.shape), str(module.weight.dtype).removeprefix("torch."))
    rows = planned_rows(state, {name: spec}, {name}, {}, lambda _name: stage)
    state.plan = model._slapo.plan.having([replace(rows[name], adapter=matrix.key)])


def _fit_layers(model: Any, name: str) -> None:
    """Let adapter `name` draw this rank's slice of dropout masks and, under ZeRO, merge into this rank's rows only."""
    state: State = model.schedule.state
    for path, layer in _layers(model, name):
        if rows := rows_of(getattr(layer.get_base_layer(), "weight", None)):
            layer.get_delta_weight = partial(_rows_of_delta, layer, rows)
        layer.train(model.training)  # peft makes new layers in training mode, whatever the model's
        site_path = f"{path}.lora_dropout.{name}"
        dropout, placed = layer.lora_dropout[name], state.placed.get(f"{path}.lora_A.{name}.weight")
        state.modules[site_path] = dropout
        directive = ForkRng(axis=-1, size=placed.shape[1]) if placed else ForkRng()
        if isinstance(dropout, nn.Dropout):
            directive.apply(Site(site_path, dropout, state))


def _rows_of_delta(layer: Any, rows: Rows, name: str) -> Tensor:
    """Return this dp rank's `rows` (under ZeRO) of scale * B A, which adapter `name` adds to the weight of `layer`."""
    return type(layer).get_delta_weight(layer, name).narrow(0, rows.first, rows.count)
