"""One optimizer over the parameters of several virtual ranks, as one optimizer for each of these ranks.

rewrite:  optimizer over hosted ranks 0..n  -->  n optimizers, each with the parameters and the state of one rank
"""

import copy
import functools
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slapo_zoo.model.gradients.of_models import parameters_of
from slapo_zoo.parallel.ranks.hosted_ranks import HostedRanks


class Hosted(Protocol):
    """Models of the ranks of `exact=` that this process runs, and the threads in which they run."""

    hosted: nn.ModuleList
    host: HostedRanks


_MODELS: "WeakSet[Any]" = WeakSet()
_STEPPING: "WeakSet[Any]" = WeakSet()  # models whose ranks take a step at the moment


def narrowed(value: Any, model: nn.Module) -> Any:
    """Return a copy of an optimizer with the parameters of `model` alone and their state; return other values unchanged."""
    if not isinstance(value, torch.optim.Optimizer):
        return value
    own = set(model.parameters())
    found = _with_parameters(value, own)
    found.state = type(value.state)(dict, {p: s for p, s in value.state.items() if p in own})
    return found


def _with_parameters(optimizer: Any, kept: set[Tensor]) -> Any:
    """Return a copy of an optimizer that steps the parameters in `kept` alone, and shares the state of all."""
    found = copy.copy(optimizer)
    found.param_groups = [
        {**group, "params": [p for p in group["params"] if p in kept]}
        for group in optimizer.param_groups
    ]
    return found


def give_back(optimizer: Any, copied: Any) -> None:
    """Copy what a call changed in `copied` (state, learning rate) to its original, `optimizer`."""
    if optimizer is copied or not isinstance(optimizer, torch.optim.Optimizer):
        return
    optimizer.state.update(copied.state)
    for group, new in zip(optimizer.param_groups, copied.param_groups, strict=True):
        group.update({name: value for name, value in new.items() if name != "params"})


def step_in_threads(model: Hosted) -> None:
    """Make torch's optimizers step the parameters of each rank of `model` in that rank's thread.

    The threads use one CPU core each, so that bits do not depend on the number of cores. The caller's thread
    would step all ranks one after another.
    """
    _MODELS.add(model)
    _watch_steps()


def steps_now(model: Hosted) -> bool:
    """Return whether the ranks of `model` run their optimizers now, as part of the user's `step()`."""
    return model in _STEPPING


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_step_ranks)


def _step_ranks(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Step the parameters of each rank of this process in its thread; return new (args, kwargs),
    with which the caller's step skips them, or None to leave all to the caller.

    Optimizers that are not torch's own may keep state that a copy lacks, and a closure computes new gradients;
    there the caller's thread steps all parameters.
    """
    closures = [value for value in (*args[1:], *kwargs.values()) if value is not None]
    scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    if closures or scaled or not type(optimizer).__module__.startswith("torch.optim."):
        return None
    left = set(parameters_of(optimizer))
    models = [model for model in _MODELS - _STEPPING if left & set(model.hosted.parameters())]
    if not models:
        return None
    for model in models:
        _step_each(model, optimizer)
        left -= set(model.hosted.parameters())
    return ((_with_parameters(optimizer, left), *args[1:]), kwargs)


def _step_each(model: Any, optimizer: Any) -> None:
    copies = {
        rank: narrowed(optimizer, each)
        for rank, each in zip(model.host.ranks, model.hosted, strict=True)
    }
    _STEPPING.add(model)
    try:
        model.host.run(lambda rank: copies[rank].step() and None)
    finally:
        _STEPPING.discard(model)
    for copied in copies.values():
        give_back(optimizer, copied)
