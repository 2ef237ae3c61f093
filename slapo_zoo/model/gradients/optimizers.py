"""Steps of optimizers that need unsharded matrices, on parameters that tp shards.

Most optimizers work element by element, so shards are enough. Adafactor factors matrices and Muon orthogonalises them:
for their steps each sharded parameter is gathered, and replaced by this rank's shard again afterwards.

rewrite:  p [O/n, I], p.grad, state [as p]  -->  [O, I] while `step()` runs  -->  this rank's shard again
"""

import inspect
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.gradients.of_models import parameters_of, place_of, runtime_of
from slapo_zoo.parallel.local_tensors import part_of, put_part
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import TensorPlan
from slapo_zoo.parallel.ranks.emulation import called_once

ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop",
    "Lion", "FusedAdam", "DeepSpeedCPUAdam",
}  # fmt: skip
WHOLE_MODEL = ("LBFGS", "Prodigy", "DAdapt")  # prefixes of optimizers that read all parameters
MATRIX_WISE = {"Adafactor": True, "Muon": False}  # whether the step reads the weights too


class OptimizerWarning(UserWarning):
    """Warning that an optimizer, not known to work element by element, gets shards of parameters."""


_ASKED: "WeakSet[Any]" = WeakSet()
_WARNED: "WeakSet[Any]" = WeakSet()
# optimizer --> (parameter, its entry in the plan, mesh, shard, shard of the gradient) while a step has them gathered
_RUNNING: "WeakKeyDictionary[Any, list[tuple[Any, TensorPlan, Mesh, Tensor, Any]]]" = (
    WeakKeyDictionary()
)


def whole_matrices(optimizer: Any) -> Any:
    """Let an optimizer see each sharded parameter, its gradient and its state unsharded in `step()`.

    Adafactor and Muon (of torch and of transformers) see them so without this call; LAMB, Shampoo and others that are
    not element-wise need it. In each step a rank receives the other ranks' shards of the parameter, of the gradient,
    and of each state tensor of that size.

    Args:
        optimizer: torch optimizer over parameters of a scheduled model; it is returned.
    """
    _ASKED.add(optimizer)
    return optimizer


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer is known to update each element by the element's own gradient and state alone.

    The result is also True for a subclass of such an optimizer whose `step` calls the base class's `step`, and False
    for a class that only has the same name as one of torch's (GaLore's AdamW).
    """
    for cls in type(optimizer).__mro__:
        step = vars(cls).get("step")
        if step is not None and cls.__name__ in ELEMENTWISE:
            return cls is getattr(torch.optim, cls.__name__, cls)
        if step is not None and "step" not in inspect.unwrap(step).__code__.co_names:
            return False  # it calls no other `step`
    return False


@called_once
def watch_steps() -> None:
    """Register torch's hooks around all optimizer steps, once per process: an optimizer that needs unsharded matrices
    (Adafactor, Muon, one given to `whole_matrices`) gets them gathered before its step; after it they are shards again.
    """
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    if is_elementwise(optimizer):
        return
    places = {p: place for p in parameters_of(optimizer) if (place := place_of(p))}
    _refuse_hosted(name, places)
    meshes = [plan.mesh for plan, _ in places.values()]
    if name.startswith(WHOLE_MODEL) and any(mesh.tp * mesh.pp > 1 for mesh in meshes):
        problem = "this optimizer computes dot products over all parameters, and a rank has shards of them"
        hint = "use tp=1 and pp=1 (dp is fine), or an optimizer that works element by element"
        raise SlapoError(f"{name}.step", "optimizer", problem, hint)
    if any(row.row_shards > 1 for plan, n in places.values() if (row := plan.of(n))):
        problem = "this optimizer may not work element by element, and each dp rank has only some rows of a weight"
        raise SlapoError(f"{name}.step", "dp_shard=", problem, "use AdamW, or leave dp_shard= out")
    parts = ((p, plan.sharded(n), plan.mesh) for p, (plan, n) in places.items())
    held = {p: (row, mesh) for p, row, mesh in parts if row}
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
    divided = {p: place for p, place in held.items() if p.grad is not None}
    closures = [value for value in (*args[1:], kwargs.get("closure")) if value is not None]
    if divided and closures:
        problem = "a closure would run the model while its parameters are gathered"
        raise SlapoError(f"{name}.step", "closure", problem, "call step() without a closure")
    _RUNNING[optimizer] = [(p, *place, p.data, p.grad) for p, place in divided.items()]
    for p, place in divided.items():
        _enlarge(optimizer, p, *place)


def _refuse_hosted(name: str, parameters: Iterable[Any]) -> None:
    """Raise SlapoError if a model of one of `parameters` was loaded with `exact=`, so that this process runs several
    virtual ranks: their optimizer, of class `name`, is not known to work element by element.
    """
    if any(runtime_of(p).calls.guard.on_ranks for p in parameters):
        problem = "the optimizer may not work element by element, and this process runs several ranks"  # fmt: skip
        raise SlapoError(f"{name}.step", "exact=", problem, "use AdamW, or leave exact= out")


def _enlarge(optimizer: Any, p: Any, row: Any, mesh: Mesh) -> None:
    """Replace this rank's shards in `p.data`, `p.grad` and `optimizer.state[p]` by unsharded tensors, gathered from the
    ranks that shard `p`, for one optimizer step; `_after` puts shards back. Muon does not read the values of `p.data`:
    for it they are not gathered, and elements of other ranks are 0. `row`, the TensorPlan of `p`, says how `p` is
    sharded, and over which dim of `mesh`.
    """
    for key, value in optimizer.state[p].items() if p in optimizer.state else ():
        if isinstance(value, Tensor) and value.shape == p.shape and value.ndim:
            optimizer.state[p][key] = whole(value, row, mesh)
    reads = MATRIX_WISE.get(type(optimizer).__name__, True)
    if reads:
        full = whole(p.data, row, mesh)
    else:  # its values are not read: no gather
        cut, empty = row.placement, p.new_zeros(row.shape)
        full = put_part(empty, p.data, cut, *mesh.place(cut.mesh_dim))
    gradient = whole(p.grad, row, mesh)
    p.grad = None
    p.data = full
    p.grad = gradient


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p, row, mesh, local, grad in _RUNNING.pop(optimizer, ()):
        full, p.grad = p.data, None
        local.copy_(part_of(full, row, mesh))
        p.data = local
        p.grad = grad
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and value.ndim and value.shape == full.shape:
                optimizer.state[p][key] = part_of(value, row, mesh)


def whole(local: Tensor, row: TensorPlan, mesh: Mesh) -> Tensor:
    """Return the unsharded tensor of which `local` is this rank's shard; a collective call of the ranks that shard it.
    `row` is the TensorPlan of the tensor: how it is sharded, and over which dim of `mesh`.
    """
    placement: Any = row.placement
    n, group = mesh.size(placement.mesh_dim), mesh.group(placement.mesh_dim)
    shapes = [placement.local_shape(row.shape, n, r) for r in range(n)]
    longest = max(torch.Size(shape).numel() for shape in shapes)
    mine = local.new_zeros(longest)
    mine[: local.numel()] = local.reshape(-1)
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    full = local.new_empty(row.shape)
    for r, (shape, part) in enumerate(zip(shapes, parts, strict=True)):
        put_part(full, part[: torch.Size(shape).numel()].view(shape), placement, n, r)
    return full
