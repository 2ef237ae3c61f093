"""Initialise tensors that no file holds: new weights, equal on every mesh, and non-persistent buffers."""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import WeightsError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.rng.device_seeds import mix
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from


def initialize_weights(
    skeleton: Any,
    units: Iterable[str],
    names: set[str],
    seed: int,
    put: Callable[[str, Tensor], None],
) -> None:
    """Draw new values of unsharded tensors, one unit (block, embedding, head) at a time, and pass each to `put`. Every
    unit has its own random generator, so values depend neither on the mesh nor on which units a rank needs. Peak memory
    is one unit.

    Args:
        skeleton: unscheduled model on meta.
        units: paths of modules that are initialised as a whole (blocks, embeddings, heads).
        names: names of the parameters and buffers to draw.
        seed: seed of the run.
        put: receives (name, unsharded tensor on the CPU).
    """
    left = set(names)

    def draw(path: str, whole: bool) -> None:
        module = skeleton.get_submodule(path)
        prefix = f"{path}." if path else ""
        wanted = [n for n, _ in _tensors(module, whole) if prefix + n in names]
        if not wanted:
            return
        parts = module.modules() if whole else (module,)
        to_meta = hf.swap_tensors(parts, _on_cpu)
        with drawn_from(mix(seed, zlib.crc32(path.encode()))), torch.no_grad():
            hf.init_module(skeleton, module) if whole else hf.init_own(skeleton, path)
        tensors = dict(_tensors(module, whole))
        for name in wanted:
            tensor = tensors[name]
            if tensor.is_floating_point() and tensor.isnan().any():
                tensor = hf.given_numbers(skeleton).get(prefix + name, tensor)
            _check_finite(prefix + name, tensor)
            put(prefix + name, tensor)
            left.discard(prefix + name)
        to_meta()

    for unit in units:
        draw(unit, whole=True)
    for path in sorted({name.rpartition(".")[0] for name in left}):
        draw(path, whole=False)  # tensors outside of units (BART's final_logits_bias)
    for name in sorted(left):
        _check_finite(name, torch.tensor(torch.nan))


def _tensors(module: nn.Module, whole: bool = True) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of a module's parameters and buffers, tied ones under each name; `whole` includes submodules."""
    return [
        *module.named_parameters(recurse=whole, remove_duplicate=False),
        *module.named_buffers(recurse=whole, remove_duplicate=False),
    ]


def _on_cpu(tensor: Tensor) -> Tensor:
    values = _poisoned(tensor, torch.device("cpu"))
    return nn.Parameter(values, False) if isinstance(tensor, nn.Parameter) else values


def _poisoned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like a meta tensor, filled with NaN (integers: 0), so that a missing initialisation is noticed."""
    empty = torch.empty_like(tensor, device=device)
    return empty.fill_(torch.nan) if empty.is_floating_point() else empty.zero_()


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.isnan().any():
        problem = "the model's own initialisation does not set this tensor"
        raise WeightsError("initialise", name, problem, "load a checkpoint that holds it")


def fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (masks, position ids, rotary tables).

    rewrite:  buffer on meta  -->  buffer on `device`, with the values of the unscheduled model
    """
    made: list[str] = []
    for path, module in model.named_modules():
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if not names:
            continue
        own = hf.initialized_as(module)
        for name in names:
            own._buffers[name] = module._buffers[name] = _poisoned(module._buffers[name], device)
        for parameter in own.parameters():  # CLIP's initialiser would draw those of children
            hf.mark_initialized(parameter)
        with torch.no_grad():
            hf.init_own(model, path)
        made += [f"{path}.{name}" for name in names]
    for name in made:
        _set_by_parent(model, name)
        _check_finite(name, model.get_buffer(name))


def _set_by_parent(model: Any, name: str) -> None:
    """Set the buffer `name`, which is NaN because nothing initialized it, by `_init_weights` of the parent of its
    module, then of the grandparent and so on, until one sets it (as in Falcon-H1). It stays NaN if none does.
    """
    path = name.rpartition(".")[0]
    while path and model.get_buffer(name).isnan().any():
        path = path.rpartition(".")[0]
        for parameter in model.get_submodule(path).parameters():
            hf.mark_initialized(parameter)
        with torch.no_grad():
            hf.init_own(model, path)
