"""Gather parameters and optimizer state of DeepSpeed's ZeRO over dp, and put them back.

ZeRO keeps them in partly private attributes, which only this file reads (DeepSpeed 0.19).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.model.dp.data_parallel import Native, Whole


def whole_parameters(model: Any, of: Callable[[Any], Tensor] | None = None) -> dict[str, Tensor]:
    """Return {name: parameter gathered over dp}, or, given a function `of`, {name: of(parameter)}; a collective."""
    found = dict(model.named_parameters(remove_duplicate=False))
    values = {id(p): (of or _whole_parameter)(p) for p in found.values()}
    return {name: values[id(p)] for name, p in found.items()}


def whole_gradient(p: Any) -> Tensor:
    """Return the gradient of the parameter `p`, gathered over dp by a collective; zeros if `p` has none. A gradient
    exists between the backward and the optimizer step.
    """
    from deepspeed.utils import safe_get_full_grad

    grad = safe_get_full_grad(p)
    return torch.zeros_like(_whole_parameter(p)) if grad is None else grad


def _whole_parameter(p: Any) -> Tensor:
    """Return `p` unsharded: in ZeRO-3 a copy gathered over dp (a trained `p` from its fp32 master), else its data."""
    from deepspeed.utils import safe_get_full_fp32_param

    if hasattr(p, "ds_id") and p.requires_grad:
        whole: Any = safe_get_full_fp32_param(p)
        return whole.to(p.dtype).clone()
    if hasattr(p, "ds_id"):
        from deepspeed.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

        with GatheredParameters([p]):
            return p.detach().clone()
    return p.detach()


class WholeZero(Whole):
    """Unsharded copies of ZeRO's parameters (`tensors`), and a torch `optimizer` over them with unsharded state, from
    which a checkpoint is written or into which one is read. `put_back` writes the copies into ZeRO's shards.

    Args:
        model: a scheduled model in a DeepSpeed engine of ZeRO stage 1 to 3.
        optimizer: DeepSpeed's optimizer, or None.
        groups: for each parameter group of the torch optimizer inside DeepSpeed's, the model's parameters in it.
    """

    def __init__(self, model: Any, optimizer: Any, groups: list[list[nn.Parameter]]):
        self.parameters = dict(model.named_parameters())
        values = whole_parameters(model)
        copies = {
            n: nn.Parameter(values[n].clone(), p.requires_grad) for n, p in self.parameters.items()
        }
        super().__init__({**copies, **dict(model.named_buffers())})
        self.zero = optimizer
        if optimizer is not None:
            named = {id(p): copies[name] for name, p in self.parameters.items()}
            self.optimizer = self._whole_optimizer(groups, named)

    def _whole_optimizer(self, groups: list[list[nn.Parameter]], named: dict[int, Any]) -> Any:
        base: Any = self.zero.optimizer
        self.pairs = [(p, named[id(p)]) for group in groups for p in group]
        members = [[named[id(p)] for p in group] for group in groups]
        options = [{k: v for k, v in g.items() if k != "params"} for g in base.param_groups]
        mine = type(base)([{"params": m, **o} for m, o in zip(members, options, strict=True)])
        flat = next((base.state[f] for f in _flat_parts(self.zero) if base.state.get(f)), {})
        for p, copied in self.pairs if flat else ():
            mine.state[copied] = {
                key: self._whole_state(p, key).to(value.dtype) if _is_divided(value) else value
                for key, value in flat.items()
            }
        return mine

    @staticmethod
    def _whole_state(p: Any, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        value: Any = safe_get_full_optimizer_state(p, key)
        return value.clone()

    def put_back(self) -> None:
        """Write the unsharded copies, into which a checkpoint was read, to ZeRO's partitions and the parameters."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                _set_parameter(p, self.tensors[name].detach())
        if self.zero is None:
            return
        base = self.zero.optimizer
        for mine, group in zip(self.optimizer.param_groups, base.param_groups, strict=True):
            group.update({k: v for k, v in mine.items() if k != "params"})
        self._put_state_back(base)

    def _put_state_back(self, base: Any) -> None:
        """Allocate ZeRO's flat optimizer state as the first optimizer step would, and fill in the loaded values. `base`
        is the torch optimizer inside ZeRO's, which holds that state.
        """
        first = next(iter(self.optimizer.state.values()), None)
        if first is None:
            base.state.clear()
            return
        like = {key for key, value in first.items() if _is_divided(value)}
        for flat in _flat_parts(self.zero):
            base.state[flat] = {
                key: torch.zeros_like(flat).detach() if key in like else _own(value)
                for key, value in first.items()
            }
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        for p, copied in self.pairs:
            for key in like:
                _set(p, self.optimizer.state[copied][key], key)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_divided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _flat_parts(zero: Any) -> list[Tensor]:
    """Return this rank's partitions of the flattened parameters, which DeepSpeed's optimizer `zero` updates."""
    found = getattr(zero, "fp32_partitioned_groups_flat", None)
    return zero.single_partition_of_fp32_groups if found is None else found


def _set_parameter(p: Any, value: Tensor) -> None:
    if hasattr(p, "ds_id"):
        _copy_part(p.ds_tensor, p, value)
        if p.data.shape == value.shape:
            p.data.copy_(value)  # gathered now, or small: ZeRO-3 keeps small ones unsharded
    else:
        p.data.copy_(value)
    if p.requires_grad:
        _set(p, value, None)


def _set(p: Any, value: Tensor, key: str | None) -> None:
    """Set the entry `key`, e.g. "exp_avg", of the optimizer state of `p` from the unsharded `value`. With `key` None
    set the fp32 copy of the parameter. DeepSpeed's own setter for ZeRO-3 refuses uneven sizes.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if hasattr(p, "ds_id"):
        part, _ = p._z3_optimizer._get_fp32_opt_state_partition(p, False, key)
        _copy_part(part, p, value)
    elif key is None:
        safe_set_full_fp32_param(p, value)
    else:
        safe_set_full_optimizer_state(p, value, key)


def _copy_part(part: Tensor, p: Any, value: Tensor) -> None:
    """Copy this rank's partition of the flattened `value` of parameter `p` into `part`; the last partition is padded."""
    rank = p._z3_optimizer._get_param_partition_rank(p)
    mine = value.detach().flatten()[rank * part.numel() :][: part.numel()]
    part.data.flatten()[: mine.numel()].copy_(mine)


class Zero(Native):
    """Data parallelism by DeepSpeed, which keeps the gradients and reduces them over dp in its optimizer step.

    Args:
        native: DeepSpeed's engine.
        groups: the parameters of each group of the optimizer.
        loss_scale: factor of the loss: the number of dp ranks if DeepSpeed averages gradients over them, else 1.
    """

    def __init__(self, native: Any, groups: list[list[nn.Parameter]], loss_scale: float = 1.0):
        super().__init__(native, loss_scale)
        self.groups = groups

    def new_gradients(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        if grads:
            return whole_parameters(model, whole_gradient)
        return whole_parameters(model) | dict(model.named_buffers(remove_duplicate=False))

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        if self.native.zero_optimization_stage() == 0:
            return super().whole(model, optimizer)
        return WholeZero(model, optimizer, self.groups)
