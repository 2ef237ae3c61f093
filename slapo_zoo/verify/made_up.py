"""Temporary random values for a model on the meta device, while it is verified."""

import torch
from torch import Tensor, nn

SEED = 20


def give_values(model: nn.Module) -> bool:
    """Replace parameters and buffers on meta by random CPU tensors, equal on all ranks; return whether any was."""
    made: dict[Tensor, Tensor] = {}
    generator = torch.Generator().manual_seed(SEED)
    for tensor in _slots(model):
        if tensor.is_meta and tensor not in made:
            made[tensor] = _like(tensor, _values(tensor, generator))
    _swap(model, made)
    return bool(made)


def take_values(model: nn.Module) -> None:
    """Replace all parameters and buffers by meta tensors; tied parameters stay tied."""
    _swap(model, {tensor: _like(tensor, tensor.data.to("meta")) for tensor in _slots(model)})


def _values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    drawn = torch.randn(tensor.shape, device="cpu", generator=generator)
    if tensor.ndim < 2:  # the weight of a norm must not be near zero, a running variance not below
        return (1 + 0.1 * drawn.clamp(-3, 3)).to(tensor.dtype)
    return (drawn / tensor[0].numel() ** 0.5).to(tensor.dtype)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _slots(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _swap(model: nn.Module, new: dict[Tensor, Tensor]) -> None:
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None and tensor in new:
                    slots[name] = new[tensor]
