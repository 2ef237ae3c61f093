"""Refresh the plan before a save: a model may have been cast since the load, or have got modules."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.checkpoints import adapters
from slapo_zoo.model.gradients.module_changes import own_name, require_known_weights
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import TensorPlan, without_peft
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.zoo.argument_values import to_dtype


def refresh_specs(model: Any, step: str) -> None:
    """Bring the specs of a model up to date: dtypes, and tensors that were added to it.

    A collective call where there are stages: each knows the dtypes of its own tensors.

    Args:
        model: of AutoScheduledModel.
        step: what is about to be done, for the errors.

    Raises:
        SlapoError: a module was added to a model in stages.
    """
    runtime, mesh = model._slapo, model.mesh
    found = _saved_tensors(model)
    known = {spec.name for spec in runtime.specs}
    require_known_weights(model, step)
    added = _added(model, found, known)
    if added and mesh.pp > 1:
        problem = f"it was added to a model of pp={mesh.pp} stages: no stage owns it"
        raise SlapoError(step, min(added), problem, "save it by itself, or use pp=1")
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
    """Tensors of this rank and the specs of all, with floating ones in a dtype; None: as they are."""
    if dtype is None:
        return local, specs
    dtype = to_dtype(dtype)
    name = str(dtype).removeprefix("torch.")
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in local.items()}
    floats = [getattr(torch, spec.dtype).is_floating_point for spec in specs]
    return cast, [
        replace(s, dtype=name) if floating else s for s, floating in zip(specs, floats, strict=True)
    ]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; of tied parameters the first name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[own_name(f"{path}.{name}" if path else name)] = buffer
    return found


def _added(model: Any, found: dict[str, Tensor], known: set[str]) -> dict[str, Tensor]:
    """Those that neither the checkpoint nor an adapter brought."""
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
