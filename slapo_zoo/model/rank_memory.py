"""Bytes that a model takes on a rank, by kind (weights, gradients, ...): now, or at the peak of a training step."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.hf.models import stays_wide
from slapo_zoo.parallel.live_bytes import OTHER, LiveBytes
from slapo_zoo.parallel.local_tensors import held_here, is_divided, rows_of
from slapo_zoo.weights.ledger import human


@dataclass(frozen=True)
class Memory:
    """Bytes of a scheduled model measured on this rank, by kind.

    Args:
        parameters: number of parameters of this rank, before ZeRO shards them.
        weights: bytes that the model computes with: parameters, or their casts and gathered copies, and its buffers.
        masters: bytes of the parameters (fp32 masters, ZeRO shards) from which a step makes casts or gathered copies.
        gradients: bytes of `.grad` of all parameters.
        states: bytes of the optimizer's state tensors.
        activations: bytes of tensors saved for the backward, and of temporary tensors.
        buffers: bytes of the receive buffers of pipeline stages.
    """

    parameters: int
    weights: int = 0
    masters: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Return the sum of the bytes of all kinds."""
        return sum(self._kinds().values())

    @property
    def per_parameter(self) -> float:
        """Return the bytes of all kinds divided by the number of this rank's parameters before ZeRO shards them."""
        return self.total / self.parameters

    def _kinds(self) -> dict[str, int]:
        return {name: size for name, size in asdict(self).items() if name != "parameters"}

    def __str__(self) -> str:
        lines = [f"{name:<12}{human(size):>10}{size / self.parameters:>8.2f} bytes per parameter"
                 for name, size in {**self._kinds(), "total": self.total}.items()]  # fmt: skip
        return "\n".join(lines)


def memory(
    model: Any, optimizer: Any, batch: Mapping[str, Any] | None, micro_batches: int | None
) -> Memory:
    """Measure the bytes of a scheduled model on this rank, by kind, now or at the peak of a training step.

    Args:
        model: a scheduled model.
        optimizer: optimizer whose states are counted, or None.
        batch: batch of one training step, which is run to measure its peak and then undone; None measures now.
        micro_batches: number of micro-batches of that step.
    """
    held = {id(p): p for p in model.parameters()}.values()
    computes, plan = model._slapo.precision.dtype, model._slapo.plan
    shapes = {
        id(p): plan.local_shape(name) if rows_of(p) else p.shape
        for name, p in model.named_parameters()
    }
    sizes = {key: torch.Size(shape).numel() for key, shape in shapes.items()}
    wide = {id(p) for path, module in model.named_modules() if computes is not None
            for n, p in module.named_parameters(recurse=False)
            if stays_wide(model, f"{path}.{n}", module, computes)}  # fmt: skip
    masters = [p for p in held if is_divided(p) or (computes is not None and id(p) not in wide)]
    mastered = {id(p) for p in masters}
    weights = [p for p in held if id(p) not in mastered]
    states = [s for state in optimizer.state.values() for s in state.values()] if optimizer else []
    at_rest = Memory(
        parameters=sum(sizes.values()),
        weights=_bytes([*weights, *model.buffers()]), masters=_bytes(masters),
        gradients=_bytes(p.grad for p in held), states=_bytes(states),
    )  # fmt: skip
    if batch is None:
        return at_rest
    found = _in_step(model, batch, micro_batches)
    kinds = {**asdict(at_rest), **{k: found[k] for k in ("activations", "buffers", "gradients")}}
    return Memory(**{**kinds, "weights": at_rest.weights + found["weights"]})


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the number of bytes of the storages of `tensors`; a storage that tensors share counts once."""
    held = (held_here(x).untyped_storage() for x in tensors if isinstance(x, Tensor))
    return sum({s._cdata: s.nbytes() for s in held}.values())


def _in_step(model: Any, batch: Mapping[str, Any], micro_batches: int | None) -> Any:
    """Run forward and backward on `batch`; return {kind of tensor: bytes that the step allocated}, at the memory peak.

    Gradients, buffers, dropout's step count and the loss scale are restored afterwards.
    """
    with _restored(model), LiveBytes() as live:
        hooks = [p.register_hook(lambda grad: live.note(grad, "gradients") if grad is not None else None)
                 for p in model.parameters() if p.requires_grad]  # fmt: skip
        try:
            model.train_step(batch, micro_batches)
        finally:
            for hook in hooks:
                hook.remove()
    return {kind: live.at_peak[kind] for kind in ("weights", "gradients", "buffers", OTHER)}


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Context of a step run to measure it; its end restores gradients, dropout's step count, loss scale and buffers."""
    stream, precision = model._slapo.schedule.state.random, model._slapo.precision
    before = stream.step, precision.scale, precision.good_steps
    parameters, buffers = list(model.parameters()), list(model.buffers())
    grads, values = [p.grad for p in parameters], [x.clone() for x in buffers]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        stream.step, precision.scale, precision.good_steps = before
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        for x, value in zip(buffers, values, strict=True):
            x.copy_(value)
