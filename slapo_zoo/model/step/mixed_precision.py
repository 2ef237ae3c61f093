"""Mixed precision: parameters are fp32 masters, and modules read casts of them.

rewrite:  y = f(x, w)  -->  y = f(x.to(bf16), w.to(bf16));  w.grad is summed in fp32

A cast is a plain tensor that replaces the parameter in its module while a forward or a recomputation runs; the
optimizer and all others see the parameter. One cast serves all micro-batches of a step. Source: arXiv:1710.03740.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.hf.models import as_computed, stays_wide
from slapo_zoo.parallel.compat import group_device
from slapo_zoo.parallel.live_bytes import counted_as
from slapo_zoo.parallel.local_tensors import is_divided
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.stand_ins import standing_in

Reads = Callable[[nn.Module, "torch.dtype | None", bool], Iterable[tuple[nn.Module, str, Tensor]]]
GROW_AFTER = 2000  # steps without overflow, as torch's GradScaler
FIRST_SCALE = 2.0**12  # where a head computes its loss in fp16, 2**16 is infinite at once


class MixedPrecision:
    """State of one model's mixed precision: casts of its parameters, and the scale of its loss.

    Args:
        dtype: dtype in which the model computes; None takes that of its parameters.
        scales: True if the loss is scaled (fp16).
    """

    def __init__(self, dtype: torch.dtype | None = None, scales: bool = False):
        self.dtype = dtype
        self.scale, self.good_steps, self.scales = (FIRST_SCALE if scales else 1.0), 0, scales
        self.reads: Reads | None = None  # ZeRO: yields gathered parameters
        self.blocks: Any = None  # ZeRO-3: `Blocks`, which are gathered when they run
        self._depth = 0
        self._in_step = False
        self._casts: list[tuple[nn.Module, str, Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the cast parameters: a copied model casts its own."""
        return {**self.__dict__, "_casts": [], "_depth": 0, "_in_step": False}

    @contextmanager
    def computing(self, model: nn.Module) -> Iterator[None]:
        """Context in which modules read parameters cast to the compute dtype; if contexts nest, the outermost casts."""
        if self.dtype is None and self.reads is None:
            yield
            return
        if not self._depth:
            with counted_as("weights"):
                self._casts = self._cast(model)
        with self._reading():
            yield

    def recomputing(self) -> Callable[[], AbstractContextManager]:
        """Return a function that makes contexts in which modules read the cast parameters, to recompute a forward."""
        block = self.blocks.again() if self.blocks else nullcontext

        @contextmanager
        def again() -> Iterator[None]:
            with self._reading(again=True), block():
                yield

        return again

    @contextmanager
    def _reading(self, again: bool = False) -> Iterator[None]:
        self._depth += 1
        try:
            with standing_in(self._casts if self._depth == 1 else ()):
                yield
        finally:
            self._depth -= 1
            if not self._depth and self.blocks and not self._in_step and not again:
                self.blocks.forget()

    @contextmanager
    def step(self, model: nn.Module) -> Iterator[None]:
        """Context of a training step: modules read parameters cast to the compute dtype; its end frees the casts."""
        self._in_step = True
        try:
            with self.computing(model):
                yield
        finally:
            self._casts, self._in_step = [], False
            if self.blocks:
                self.blocks.forget()

    def _cast(self, model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
        if self.reads is None:
            return list(_casts_of(model, self.dtype))
        found = list(self.reads(model, self.dtype, not self._in_step))
        return found + list(_casts_of(model, self.dtype) if self.dtype is not None else ())

    def state(self) -> dict[str, float] | None:
        """Return the state of the loss scale for a checkpoint; None without loss scaling."""
        return {"scale": self.scale, "good_steps": self.good_steps} if self.scales else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Set the loss scale from a saved state; None changes nothing."""
        if self.scales and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

    def unscale(self, parameters: Iterable[Tensor], mesh: Mesh) -> None:
        """Divide gradients of `parameters` by the loss scale; on inf or nan on a rank drop all and halve the scale."""
        if not self.scales:
            return
        held = [p for p in parameters if p.grad is not None]
        grads: list[Any] = [p.grad for p in held]
        if _any_overflow(grads, mesh):
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            for p in held:
                p.grad = None
            return
        if grads:
            torch._foreach_mul_(grads, 1 / self.scale)  # pyright: ignore[reportPrivateImportUsage]
        self.good_steps += 1
        if self.good_steps == GROW_AFTER:
            self.scale, self.good_steps = self.scale * 2, 0


def _any_overflow(grads: list[Tensor], mesh: Mesh) -> bool:
    bad = [~torch.isfinite(grad).all() for grad in grads]
    if bad:
        found = torch.stack(bad).any().float()
    else:  # nccl sends nothing from the CPU
        found = torch.zeros((), device=group_device() if mesh.world_size > 1 else "cpu")
    for mesh_dim in mesh.sizes:
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.group(mesh_dim))
    return bool(found)


def _casts_of(model: nn.Module, dtype: Any) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (module, name, cast to `dtype`) of each floating parameter of another dtype, except those that stay in fp32
    (of batch norms, and those that the model's class names). Tied parameters share one cast.
    """
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None or not p.is_floating_point() or p.dtype == dtype or is_divided(p):
                continue
            if not stays_wide(model, f"{path}.{name}", module, dtype):
                if id(p) not in made:
                    made[id(p)] = p.to(dtype)
                yield module, name, made[id(p)]


def computing_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the model's `forward` wrapped to run in the model's compute dtype: parameters and floating inputs are cast
    first. Labels keep their dtype.
    """

    @wraps(forward)
    def narrow(model: Any, *args: Any, **kwargs: Any) -> Any:
        precision: MixedPrecision = model._slapo.precision
        inputs = [as_computed("", x, precision.dtype) for x in args]
        named = {name: as_computed(name, x, precision.dtype) for name, x in kwargs.items()}
        with precision.computing(model):
            return forward(model, *inputs, **named)

    return narrow
