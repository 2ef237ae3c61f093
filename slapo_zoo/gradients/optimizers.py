"""Optimizers that look at a whole matrix, on parameters of which a rank holds a part.

Most optimizers work element by element: a part of a matrix is all they need. Adafactor factors a matrix
and Muon orthogonalises it: for their step each sharded parameter is put together, and its part kept.

rewrite:  p [O/n, I], p.grad, state [as p]  -->  [O, I] while `step()` runs  -->  this rank's part again
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import SlapoError
from slapo_zoo.language.directive import Placed
from slapo_zoo.parallel.local_tensors import local_part, put_part
from slapo_zoo.parallel.mesh import Mesh

ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop",
    "Lion", "FusedAdam", "DeepSpeedCPUAdam",
}  # fmt: skip
WHOLE_MODEL = (
    "LBFGS",
    "Prodigy",
    "DAdapt",
)  # how names of those begin that look at all parameters at once
MATRIX_WISE = {"Adafactor": True, "Muon": False}  # whether the step reads the weights too


class OptimizerWarning(UserWarning):
    """An optimizer may need whole matrices, and sees parts of them."""


@dataclass
class _Swapped:
    """Local tensors of a parameter that one step has replaced by whole ones."""

    local: Tensor
    grad: Tensor


_DIVIDED: Any = WeakIdKeyDictionary()  # parameter --> (Placed, Mesh)
_APART: Any = WeakIdKeyDictionary()  # parameters of models of which a rank holds a part
_ASKED: "WeakSet[Any]" = WeakSet()
_WARNED: "WeakSet[Any]" = WeakSet()
_RUNNING: "WeakKeyDictionary[Any, list[tuple[Any, _Swapped]]]" = WeakKeyDictionary()
_HOOKS: list[Any] = []


def whole_matrices(optimizer: Any) -> Any:
    """Let an optimizer see every sharded parameter, its gradient and its state as a whole.

    Adafactor and Muon (of torch and of transformers) are treated so without being asked. It is for LAMB,
    Shampoo and others that look at more than one element. Each step, a rank receives the other ranks'
    parts of the weight, the gradient and each state tensor of that size.

    Args:
        optimizer: of torch, over parameters of a scheduled model.

    Returns:
        the same optimizer.
    """
    _ASKED.add(optimizer)
    return optimizer


def note_divided(model: Any) -> None:
    """Remember which parameters of a model are parts, for the hooks around optimizer steps."""
    placed: Mapping[str, Placed] = model.schedule.state.placed
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if model.mesh.tp * model.mesh.pp > 1:
            _APART[parameter] = True
        found = placed.get(name)
        if found is not None and model.mesh.size(found.placement.mesh_dim) > 1:
            _DIVIDED[parameter] = found, model.mesh
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_before))
        _HOOKS.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    if any(cls.__name__ in ELEMENTWISE for cls in type(optimizer).__mro__):
        return
    if name.startswith(WHOLE_MODEL) and any(
        p in _APART for group in optimizer.param_groups for p in group["params"]
    ):
        problem = "its step is made of dot products over all parameters, and this rank holds a part of them"
        hint = "use tp=1 and pp=1 (dp is fine), or an optimizer that works element by element"
        raise SlapoError(f"{name}.step", "optimizer", problem, hint)
    if any(hasattr(p, "whole_shape") for group in optimizer.param_groups for p in group["params"]):
        problem = "it is not known to work element by element, and each dp rank holds some rows"
        raise SlapoError(f"{name}.step", "dp_shard=", problem, "use AdamW, or leave dp_shard= out")
    held = [p for group in optimizer.param_groups for p in group["params"] if p in _DIVIDED]
    if name not in MATRIX_WISE and optimizer not in _ASKED:
        if held and optimizer not in _WARNED:
            _WARNED.add(optimizer)
            warnings.warn(
                f"{name} is not known to work element by element, and sees parts of {len(held)} "
                "sharded parameters: slapo_zoo.whole_matrices(optimizer) lets it see them whole",
                OptimizerWarning,
                stacklevel=4,
            )
        return
    divided = [p for p in held if p.grad is not None]
    closures = [value for value in (*args[1:], kwargs.get("closure")) if value is not None]
    if divided and closures:
        problem = "it would run the model while its parameters are whole"
        raise SlapoError(f"{name}.step", "closure", problem, "call step() without one")
    _RUNNING[optimizer] = [(p, _enlarge(optimizer, p)) for p in divided]


def _enlarge(optimizer: Any, p: Any) -> _Swapped:
    """Put the whole parameter, gradient and state where the parts were."""
    placed, mesh = _DIVIDED[p]
    swapped = _Swapped(p.data, p.grad)
    for key, value in optimizer.state[p].items() if p in optimizer.state else ():
        if isinstance(value, Tensor) and value.shape == p.shape and value.ndim:
            optimizer.state[p][key] = whole(value, placed, mesh)
    reads = MATRIX_WISE.get(type(optimizer).__name__, True)
    full = whole(p.data, placed, mesh) if reads else _own_place(p.data, placed, mesh)
    gradient = whole(p.grad, placed, mesh)
    p.grad = None
    p.data = full
    p.grad = gradient
    return swapped


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p, swapped in _RUNNING.pop(optimizer, ()):
        placed, mesh = _DIVIDED[p]
        full, p.grad = p.data, None
        swapped.local.copy_(part_of(full, placed, mesh))
        p.data = swapped.local
        p.grad = swapped.grad
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and value.ndim and value.shape == full.shape:
                optimizer.state[p][key] = part_of(value, placed, mesh)


def part_of(full: Tensor, placed: Placed, mesh: Mesh) -> Tensor:
    """This rank's part of what `whole` gives."""
    n, r = (f(placed.placement.mesh_dim) for f in (mesh.size, mesh.coord))
    return local_part(full, placed.placement, n, r)


def _own_place(local: Tensor, placed: Placed, mesh: Mesh) -> Tensor:
    """Zeros of the whole size with this rank's part in its place: nothing is sent."""
    n, r = (f(placed.placement.mesh_dim) for f in (mesh.size, mesh.coord))
    return put_part(local.new_zeros(placed.shape), local, placed.placement, n, r)


def whole(local: Tensor, placed: Placed, mesh: Mesh) -> Tensor:
    """The whole tensor of which every rank of a mesh dim holds a part; a collective call over it."""
    placement = placed.placement
    n, group = mesh.size(placement.mesh_dim), mesh.group(placement.mesh_dim)
    shapes = [placement.local_shape(placed.shape, n, r) for r in range(n)]
    longest = max(torch.Size(shape).numel() for shape in shapes)
    mine = local.new_zeros(longest)
    mine[: local.numel()] = local.reshape(-1)
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    full = local.new_empty(placed.shape)
    for r, (shape, part) in enumerate(zip(shapes, parts, strict=True)):
        put_part(full, part[: torch.Size(shape).numel()].view(shape), placement, n, r)
    return full
