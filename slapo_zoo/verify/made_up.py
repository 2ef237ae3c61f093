"""Temporary random values for a model on the meta device, while it is verified."""

import torch
from torch import Tensor, nn

from slapo_zoo.hf.models import like, swap_tensors

SEED = 20


def give_values(model: nn.Module) -> bool:
    """Replace parameters and buffers on meta by random CPU tensors, equal on all ranks; return whether there were any."""
    generator, made = torch.Generator().manual_seed(SEED), []

    def new(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        made.append(_like(tensor, _values(tensor, generator)))
        return made[-1]

    swap_tensors(model.modules(), new)
    return bool(made)


def take_values(model: nn.Module) -> None:
    """Replace all parameters and buffers by meta tensors; tied parameters stay tied."""
    swap_tensors(model.modules(), lambda tensor: _like(tensor, tensor.data.to("meta")))


def _values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    drawn = torch.randn(tensor.shape, device="cpu", generator=generator)
    if tensor.ndim < 2:  # the weight of a norm must not be near zero, a running variance not below
        return (1 + 0.1 * drawn.clamp(-3, 3)).to(tensor.dtype)
    return (drawn / tensor[0].numel() ** 0.5).to(tensor.dtype)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with `values`, of the class of `tensor`: a parameter for a parameter, annotations included."""
    found = like(tensor, values)
    if isinstance(tensor, nn.Parameter):
        found.__dict__.update(tensor.__dict__)
    return found
