"""Fill a sharded model on the meta device with values: read from a checkpoint, or random."""

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import WeightsError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.local_tensors import RowsOfRank, part_of, rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.initialize import fill_buffers, initialize_weights
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.weights.ledger import AnonymousPeak, Ledger, human
from slapo_zoo.weights.load_memory import Target, fresh_like
from slapo_zoo.weights.load_rank_slices import LoadOptions, load_tensors
from slapo_zoo.weights.names import NameMap, match_names

# Keys beside a quantized weight in files of bitsandbytes, GPTQ, AWQ and fp8.
QUANTIZED = r"\.(SCB|weight_format|qweight|qzeros|scales|g_idx|absmax|quant_map|quant_state\..*|.*_scale(_inv)?)$"


def fill_from_folder(
    model: Any, skeleton: Callable[[], Any], plan: RankPlan, folder: CheckpointFolder,
    device: torch.device, units: Sequence[str], seed: int, keys: KeyMap,
    options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    over_dp: RowsOfRank | None = None,
) -> Ledger:  # fmt: skip
    """Allocate this rank's tensors and read its slices from a checkpoint; return a record: bytes, seconds, names, ...
    Weights that the checkpoint lacks are initialised with random values.

    Args:
        model: model on meta, sharded by its schedule and reduced to this rank's pipeline stages.
        skeleton: returns the same model unscheduled and unsharded, on meta.
        plan: how every tensor of the model is sharded, and the coordinates of this rank.
        folder: opened checkpoint.
        device: device of the allocated tensors.
        units: paths of the modules that are initialised one at a time: blocks, embeddings and heads.
        seed: seed of newly initialised weights.
        keys: renames between the model's tensors and keys of the files.
        options: memory limit and checks.
        over_dp: which rows of each parameter this rank holds under ZeRO; None without ZeRO.
    """
    begin, mesh, specs = time.perf_counter(), plan.mesh, plan.saved
    with AnonymousPeak(exact=False) as peak:
        key_of = {keys.to_model(key): key for key in folder.key_to_file}
        expected = keys.read_specs(specs, key_of)
        names = match_names(
            [spec.name for spec in expected], key_of, model.base_model_prefix,
            hf.ignored_keys(model), hf.tied_names(model),
        )  # fmt: skip
        _refuse_foreign(names, units, folder, model.base_model_prefix)
        names = (
            _without_mismatched(names, expected, folder, key_of)
            if options.redraw_mismatched
            else names
        )
        _refuse_untied(
            [tuple(key_of[name] for name in each) for each in names.doubles], folder, mesh
        )
        _check_memory(model, options, mesh, over_dp)
        held = _allocate(model, device, over_dp)
        local = keys.split(held, specs, mesh, key_of)
        local = {name: tensor for name, tensor in local.items() if tensor.numel()}
        known = {spec.name: spec for spec in expected}
        targets = {
            name: Target(
                tensor,
                known[plan.saved_as(name)].shape,
                known[plan.saved_as(name)].placement,
                rows_of(tensor),
                may_map=options.map_weights and held.get(name) is tensor,  # not a view
            )
            for name, tensor in local.items()
            if plan.saved_as(name) in names.source
        }
        source = {name: key_of[names.source[plan.saved_as(name)]] for name in targets}
        load = functools.partial(load_tensors, targets, folder, source, mesh, options.check_finite)
        loaded = together(mesh, "from_pretrained", load)[mesh.rank]  # raises on all ranks or none
        missing = {name: local[name] for name in local if name not in targets}
        _draw(skeleton, units, missing, plan, seed)
        fill_buffers(model, device)
    return Ledger(
        tensors=loaded.tensors, bytes_read=loaded.bytes_read,
        shard_bytes=sum(t.nbytes for t in local.values()), files_opened=len(folder.saves()),
        seconds=time.perf_counter() - begin, peak_anonymous=peak.growth,
        newly_initialized=names.missing, unexpected=names.unexpected, mapped=loaded.mapped,
    )  # fmt: skip


def fill_from_config(
    model: Any, skeleton: Callable[[], Any], plan: RankPlan, device: torch.device, units: Sequence[str], seed: int,
    over_dp: RowsOfRank | None = None,
) -> Ledger:  # fmt: skip
    """Allocate this rank's tensors and initialise every weight with random values; return a record: bytes, seconds, ...
    The unsharded weights are equal on every mesh. `model` is on meta and sharded as `plan` says, `skeleton` returns it
    unsharded, `units` are the paths of blocks, embeddings and heads, `over_dp` gives this rank's rows under ZeRO.
    """
    begin = time.perf_counter()
    with AnonymousPeak(exact=False) as peak:
        local = _allocate(model, device, over_dp)
        _draw(skeleton, units, local, plan, seed)
        fill_buffers(model, device)
    return Ledger(
        shard_bytes=sum(t.nbytes for t in local.values()),
        seconds=time.perf_counter() - begin, peak_anonymous=peak.growth,
        newly_initialized=[row.name for row in plan.saved],
    )  # fmt: skip


def _check_memory(model: Any, options: LoadOptions, mesh: Mesh, over_dp: RowsOfRank | None) -> None:
    """Raise WeightsError on all ranks, before any allocation, if a rank's weights exceed `options.max_memory` bytes."""
    limit = options.max_memory
    if limit is None:
        return
    shard = sum(buffer.nbytes for buffer in model.buffers())
    for p in model.parameters():
        shape = over_dp.shape_of(p) if over_dp else p.shape
        shard += torch.Size(shape).numel() * p.itemsize

    def check() -> None:
        if shard > limit:
            found = f"found {human(limit)}, expected at least {human(shard)}"
            problem = f"{found}: {human(shard - limit)} more for this rank's weights"
            hint = "raise the limit, or shard the model over more ranks (tp, pp, dp_shard)"
            raise WeightsError(f"rank {mesh.rank}", "max_load_memory", problem, hint)

    together(mesh, "from_pretrained", check)


def _fresh(tensor: nn.Parameter, device: torch.device, over_dp: RowsOfRank | None) -> nn.Parameter:
    """Return an empty parameter on `device` like `tensor` on meta; with `over_dp` (ZeRO) this rank's rows only."""
    if over_dp is None or not tensor.ndim:
        return nn.Parameter(fresh_like(tensor, device), tensor.requires_grad)
    part = fresh_like(tensor.new_empty(over_dp.shape_of(tensor)), device)
    return over_dp.note(nn.Parameter(part, tensor.requires_grad), tensor.shape)


def _allocate(
    model: Any, device: torch.device, over_dp: RowsOfRank | None = None
) -> dict[str, Tensor]:
    """Replace the parameters and persistent buffers of a model on meta by empty ones on `device`; tied ones stay tied.

    Returns:
        name --> local tensor (under ZeRO the rows that `over_dp` gives); tied parameters only under the first name.
    """
    local, made = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = local[prefix + name] = _fresh(tensor, device, over_dp)
            module._parameters[name] = made[id(tensor)]
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = fresh_like(tensor, device)
                local[prefix + name] = module._buffers[name]
    return local


def _draw(
    skeleton: Callable[[], Any],
    units: Sequence[str],
    missing: dict[str, Tensor],
    plan: RankPlan,
    seed: int,
) -> None:
    """Fill the tensors of `missing`, {name: local tensor}, with random values: draw the unsharded weights of one of
    `units` (blocks, embeddings, heads) at a time, copy this rank's shards. `skeleton` returns the unsharded meta model.
    """
    wanted: dict[str, list[str]] = {}
    for name in missing:
        wanted.setdefault(plan.saved_as(name), []).append(name)

    def put(full_name: str, full: Tensor) -> None:
        for name in wanted[full_name]:
            part = part_of(full, plan.of(name), plan.mesh)
            if rows := rows_of(missing[name]):
                part = part.narrow(0, rows.first, rows.count)
            missing[name].detach().copy_(part)

    if wanted:
        initialize_weights(skeleton(), units, set(wanted), seed, put)


def _refuse_foreign(
    names: NameMap, units: Sequence[str], folder: CheckpointFolder, prefix: str
) -> None:
    """Raise WeightsError if missing or unexpected keys (in `names`) show that `folder` is for another architecture or
    size. A checkpoint may lack a head, or parts of it (`cls.seq_relationship`), or have another head. A missing or
    surplus block, or part of a block or embedding, is an error. `prefix` is the attribute that holds the base model
    ("transformer"), `units` the paths of blocks, embeddings, heads.
    """
    strip = f"{prefix}."
    body = [unit for unit in units if unit.startswith(strip)] or list(units)
    lists = {child.rpartition(".")[0] for child in body if child.rpartition(".")[2].isdigit()}
    held = {path for name in names.source for path in _modules_around(name)}
    parts = {*(unit for unit in body if unit in held), *lists}
    known = {unit.removeprefix(strip) for unit in (*body, *lists)}
    modules = {name.rpartition(".")[0] for name in (*names.source, *names.missing)}
    missing = [
        name
        for name in names.missing
        if name.rpartition(".")[0] in held or not parts.isdisjoint(_modules_around(name))
    ]
    unexpected = [
        key
        for key in names.unexpected
        if key.rpartition(".")[0] in modules
        or not known.isdisjoint(_modules_around(key.removeprefix(strip)))
    ]
    if not missing and not unexpected:
        return
    lines = ["", *(f"missing: {name}" for name in missing[:20])]
    lines += [f"unexpected: {key}" for key in unexpected[:20]]
    what = f"{len(missing)} missing and {len(unexpected)} unexpected keys"
    hint = "pass a checkpoint of this architecture and size"
    if missing and not names.source:
        lines.append(f"found instead: {', '.join(names.unexpected[:3])}, ...")
        hint += "; a prefix such as module. or _orig_mod. is no part of a key: save the state dict of the inner model"
    if any(re.search(QUANTIZED, key) for key in unexpected):
        hint = "quantized weights cannot be trained: load the checkpoint from which they were made"
    raise WeightsError(str(folder.path), what, "\n    ".join(lines), hint)


def _without_mismatched(
    names: NameMap, expected: Sequence[TensorSpec], folder: CheckpointFolder, key_of: Mapping[str, str]
) -> NameMap:  # fmt: skip
    """Return a copy of `names` in which tensors whose shape in the files is not that in `expected` move from `source`
    (name in the model --> key, spelled as in the model) to `missing`. `key_of` maps these keys to the files' own.
    """
    shapes = {spec.name: spec.shape for spec in expected}
    differ = {n for n, key in names.source.items() if folder.shape(key_of[key]) != shapes[n]}
    source = {name: key for name, key in names.source.items() if name not in differ}
    return replace(names, source=source, missing=[*names.missing, *sorted(differ)])


def _refuse_untied(
    doubles: Sequence[tuple[str, ...]], folder: CheckpointFolder, mesh: Mesh
) -> None:
    """Raise WeightsError when a checkpoint holds different values under two keys that the config ties to one tensor.
    `doubles` are groups of keys, one group per tied tensor. Rank 0 compares the values; all ranks raise the error.
    """

    def check() -> None:
        for first, *others in doubles if mesh.rank == 0 else ():
            for other in others:
                a, b = folder.view(first), folder.view(other)
                if a.shape != b.shape or not torch.equal(a, b.to(a.dtype)):
                    problem = (
                        f"the config ties this tensor to {first!r}, but the file holds other values"
                    )
                    hint = "pass tie_word_embeddings=False: both are kept, as in transformers"
                    raise WeightsError(str(folder.path), other, problem, hint)

    if doubles:
        together(mesh, "from_pretrained", check)


def _modules_around(name: str) -> list[str]:
    """Return the paths of the modules around a tensor: `a.b.weight` --> `a.b`, `a`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
