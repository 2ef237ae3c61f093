"""Gradient hooks of the user on parameters: a hook gets the unsharded gradient, as in the plain model.

In `train_step` each hook runs once, on the gradient of the whole batch. In a loop of the user's own it runs in every
backward, after the sum over tp and before the average over dp (with `dp_shard=` after it). Ranks that hold shards
gather the gradient and keep their shard of the hook's result, so all ranks must register the hook.
"""

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from slapo_zoo.errors import MeshError
from slapo_zoo.model.gradients.optimizers import whole
from slapo_zoo.parallel.local_tensors import is_divided, part_of, rows_of


class OnWhole:
    """Gradient hook that stands for a user's `hook` on `parameter`: gathers the gradient, then calls `hook` with it."""

    def __init__(self, reducer: Any, name: str, parameter: nn.Parameter, hook: Any):
        self.reducer, self.parameter = ref(reducer), ref(parameter)
        self.name, self.hook = name, hook

    def __call__(self, grad: Tensor) -> Any:
        """Return this rank's shard of the hook's result for gathered `grad`; None in `train_step`: it runs later."""
        reducer = self.reducer()
        if reducer is None:  # the model was deleted, its parameter not
            return self.hook(grad)
        return self.on(grad) if reducer.at_once else None

    def on(self, grad: Tensor) -> Tensor:
        """Call the user's hook on the gathered gradient; return this rank's shard of the result. `grad` is a shard."""
        runtime, p = self.reducer().runtime, self.parameter()  # pyright: ignore[reportOptionalMemberAccess]
        mesh, plan, rows = runtime.schedule.mesh, runtime.plan, rows_of(p)
        full, placed = grad, plan.sharded(self.name)
        full = (
            runtime.data_parallel.whole_of(full, p, plan.local_shape(self.name)) if rows else full
        )
        full = whole(full, placed, mesh) if placed else full
        if full is grad:
            found = self.hook(grad)
            return grad if found is None else found
        found = self._called(full)
        found = part_of(found, placed, mesh) if placed else found
        found = found.narrow(0, rows.first, rows.count) if rows else found
        return torch.empty_like(grad).copy_(found)

    def _called(self, full: Tensor) -> Tensor:
        try:
            found = self.hook(full)
            if found is not None and found.shape != full.shape:
                raise IndexError(f"the hook returned a tensor of shape {list(found.shape)}")
        except (RuntimeError, IndexError) as error:
            problem = f"the hook failed on the gradient of the unsharded parameter {list(full.shape)}: {error}"
            hint = "use tensors of that shape in the hook, or change this rank's .grad after the backward instead"
            raise MeshError("backward", f"a hook on {self.name}", problem, hint) from error
        return full if found is None else found


def on_parts(model: Any) -> int:
    """Return the number of gradient hooks that the user registered on sharded parameters of the model on this rank."""
    plan = model._slapo.plan
    parts = (p for name, p in model.named_parameters() if is_divided(p) or plan.sharded(name))
    hooks = (hook for p in parts for hook in (p._backward_hooks or {}).values())
    return sum(isinstance(hook, OnWhole) or _is_foreign(hook) for hook in hooks)


def take_over(reducer: Any, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Wrap the user's gradient hooks that are new since the last call, so that they get gradients summed over ranks.

    `reducer` is the GradientReducer that sums the gradients; `named` are (name, parameter) pairs of the model.
    """
    for name, p in named:
        hooks: Any = p._backward_hooks
        if p.is_leaf and hooks and any(map(_is_foreign, hooks.values())):
            made = {key: OnWhole(reducer, name, p, hook) if _is_foreign(hook) else hook
                    for key, hook in hooks.items()}  # fmt: skip
            hooks.clear()  # the same dict, which torch holds
            hooks.update(sorted(made.items(), key=lambda each: isinstance(each[1], OnWhole)))


def run_later(reducer: Any, parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Run the user's gradient hooks on the complete gradients of a `train_step`, unless hooks ran in the backward.

    Args:
        reducer: GradientReducer of the model, which knows if hooks ran in the backward.
        parameters: parameters of this rank.
        scale: loss scale of fp16, by which gradients are divided before a hook and multiplied after it. An infinite
            result of a hook counts as an overflow.
    """
    for p in parameters if not reducer.at_once else ():
        for hook in list((p._backward_hooks or {}).values()):
            if isinstance(hook, OnWhole) and p.grad is not None:
                with torch.no_grad():
                    p.grad.copy_(hook.on(p.grad / scale) * scale)


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("slapo_zoo.")
