"""Split an optimizer over the parameters of n virtual ranks, which one process runs with `exact=`, into n optimizers.

rewrite:  optimizer over virtual ranks 0..n-1  -->  n optimizers, each with the parameters and the state of one rank
"""

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.model.gradients.of_models import parameters_of
from slapo_zoo.model.gradients.optimizers import is_elementwise


def narrowed(value: Any, model: nn.Module) -> Any:
    """Return a copy of an optimizer `value` that has only the parameters of `model` and their state. In a list or tuple
    each optimizer is replaced by such a copy; a `value` that is no optimizer is returned unchanged.
    """
    if isinstance(value, list | tuple) and any(
        isinstance(one, torch.optim.Optimizer) for one in value
    ):
        return [narrowed(one, model) for one in value]
    if not isinstance(value, torch.optim.Optimizer):
        return value
    own = set(model.parameters())
    found = _with_parameters(value, own)
    found.state = type(value.state)(dict, {p: s for p, s in value.state.items() if p in own})
    return found


def _with_parameters(optimizer: Any, kept: Collection[Tensor]) -> Any:
    """Return a copy of an optimizer that steps only the parameters in `kept` and shares the `state` of the original."""
    found = copy.copy(optimizer)
    found.param_groups = [
        {**group, "params": [p for p in group["params"] if p in kept]}
        for group in optimizer.param_groups
    ]
    return found


def give_back(optimizer: Any, copied: Any) -> None:
    """Copy state and options, such as the learning rate, from `copied` back to `optimizer`, of which it is a copy."""
    if isinstance(optimizer, list | tuple):
        for one, its_copy in zip(optimizer, copied, strict=True):
            give_back(one, its_copy)
    if optimizer is copied or not isinstance(optimizer, torch.optim.Optimizer):
        return
    optimizer.state.update(copied.state)
    for group, new in zip(optimizer.param_groups, copied.param_groups, strict=True):
        group.update({name: value for name, value in new.items() if name != "params"})


def split_over_ranks(optimizer: Any, args: Any, models: Iterable[nn.Module]) -> list[Any] | None:
    """Return one optimizer for each of `models`, or None if `optimizer` has to step all parameters in one call.

    The result is None for optimizers that are not torch's own (a copy may lack some of their state) or not
    element-wise, for a closure (it computes new gradients), and if a fused step reads a gradient scaler's factor.

    Args:
        optimizer: optimizer over the parameters of all models.
        args: values of the arguments that its `step` was called with, named ones too.
        models: models of the virtual ranks of this process.
    """
    scaled = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    known = type(optimizer).__module__.startswith("torch.optim.")
    if not known or any(value is not None for value in (*args, *scaled)):
        return None
    return [narrowed(optimizer, model) for model in models] if is_elementwise(optimizer) else None


def without(optimizer: Any, models: nn.Module) -> Any:
    """Return a copy of an optimizer that shares its state and steps only parameters outside `models`."""
    return _with_parameters(optimizer, set(parameters_of(optimizer)) - set(models.parameters()))
