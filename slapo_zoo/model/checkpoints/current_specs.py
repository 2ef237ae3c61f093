"""Tensors, configs, tokenizer files and card (published schedule) that a save writes, for the model as it then is.

Since the load the user may have cast the model, or added modules to the model.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.checkpoints import adapters
from slapo_zoo.model.gradients.module_changes import own_name, require_known_weights
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import TensorPlan, without_peft
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.weights.carry import carry_tokenizer
from slapo_zoo.weights.load_rank_slices import to_dtype


def refresh_specs(model: Any, step: str) -> None:
    """Update the model's list of tensors to save: their present dtypes, and tensors that the user added since the load.

    A collective call with pp > 1. `step` is the name of the running call ("save_pretrained"), for errors.

    Raises:
        SlapoError: a sharded or tied parameter was replaced, or with pp > 1 a tensor was added.
    """
    runtime, mesh = model._slapo, model.mesh
    found = _saved_tensors(model)
    known = {spec.name for spec in runtime.specs}
    require_known_weights(model, step)
    added = _added(model, found, known)
    if added and mesh.pp > 1:
        problem = f"the tensor was added after the load: none of the pp={mesh.pp} stages saves it"
        raise SlapoError(step, min(added), problem, "save this tensor separately, or use pp=1")
    dtypes = {name: _dtype(tensor) for name, tensor in found.items() if name in known}
    if mesh.pp > 1:
        every = together(mesh, step, lambda: {mesh.coord("pp"): dtypes})
        of_stage = {stage: each for one in every for stage, each in one.items()}
    else:
        of_stage = {0: dtypes}
    changed = [
        replace(row, dtype=of_stage[row.stage].get(row.name, row.dtype)) for row in runtime.specs
    ]
    changed += [TensorPlan(n, tuple(t.shape), _dtype(t)) for n, t in added.items()]
    runtime.schedule.state.plan = runtime.plan.having(changed)


def written_as(
    dtype: Any, local: dict[str, Tensor], specs: list[TensorSpec]
) -> tuple[dict[str, Tensor], list[TensorSpec]]:
    """Return (`local`, `specs`) for a save in `dtype`: floating tensors are cast; None changes nothing.

    `local` maps names to this rank's tensors; `specs` have the name, shape and dtype of each tensor of the model.
    """
    if dtype is None:
        return local, specs
    dtype = to_dtype(dtype, "save_pretrained")
    name = str(dtype).removeprefix("torch.")
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in local.items()}
    floats = [getattr(torch, spec.dtype).is_floating_point for spec in specs]
    return cast, [
        replace(s, dtype=name) if floating else s for s, floating in zip(specs, floats, strict=True)
    ]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of a model's parameters and persistent buffers; a tied parameter has its first name only."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[own_name(f"{path}.{name}" if path else name)] = buffer
    return found


def _added(model: Any, found: dict[str, Tensor], known: set[str]) -> dict[str, Tensor]:
    """Return those tensors of `found` that the user added: not in `known`, nor tied to one there, nor an adapter's."""
    runtime = model._slapo
    tied = {name for names in runtime.plan.ties() if not known.isdisjoint(names) for name in names
            if sum(n in found for n in names) < 2}  # fmt: skip
    of_adapters = {
        adapters.parameter_of(spec.name, name)
        for name, specs in runtime.adapters.items() for spec in specs
    }  # fmt: skip
    return {
        name: tensor for name, tensor in found.items()
        if without_peft(name) not in known and name not in of_adapters
        and name not in tied
    }  # fmt: skip


def extras_of(model: Any, target: Any, published: bool, dtype: Any) -> Callable[[Path, str], None]:
    """Return a function (folder, id of the save) that writes a save's files other than weights: configs, tokenizer, card.

    Args:
        model: a scheduled model.
        target: folder that the save will replace; tokenizer files that it has are not copied again.
        published: also write the schedule as a card (schedule.json) and a README for the Hub.
        dtype: dtype of the saved weights, for config.json; None: that of the model.
    """
    write_configs = configs_of(model, target, dtype)

    def write(folder: Path, save: str) -> None:
        write_configs(folder)
        if published:
            from slapo_zoo.zoo.cards.publish import write_beside

            write_beside(model, folder)

    return write


def configs_of(model: Any, target: Any, dtype: Any = None) -> Callable[[Path], None]:
    """Return a function (folder) that writes the model's config.json, generation_config.json and tokenizer files.

    Tokenizer files come from the folder that the model was loaded from, unless the folder `target`, which the save
    replaces, has its own. `dtype` is that of the saved weights, for config.json; None takes the model's.
    """
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.architectures = [model.unscheduled_class.__name__]
    config.dtype = next(model.parameters()).dtype if dtype is None else to_dtype(dtype)
    configs, source = [config], model._slapo.source
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        configs.append(copy.deepcopy(model.generation_config))

    def write(folder: Path) -> None:
        for one in configs:
            one.save_pretrained(folder)
        carry_tokenizer(source, Path(target), folder)

    return write
