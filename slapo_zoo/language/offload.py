"""Storage for the activations that autograd saves: host memory, or one share (1/tp of the elements) per tp rank.

rewrite:  saved x [...] on the device  -->  x in pinned memory of the host  -->  x on the device for the backward
          saved x [B, S, D] on each of n ranks  -->  saved x_r [B * S * D / n]; the backward all-gathers x

Copies run on a side stream beside the computation. When the backward first needs an activation of a
module, all activations of that module and of the module before it start to be copied back. On a CPU nothing is copied.
Sources: Rhu et al. 2016, arXiv:1602.08124; Korthikanti et al. 2022, arXiv:2205.05198, section 6 (Megatron-LM's
--distribute-saved-activations).
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.parallel.compat import all_gather_single
from slapo_zoo.parallel.made_again import saving
from slapo_zoo.parallel.mesh import Mesh

SHARDED = "sharded"  # the policy of recomputation that keeps shares
LEAST = 64 << 10  # bytes; smaller activations stay on the device
Pack = Callable[[Tensor], Any]  # saved tensor --> itself, or a handle (Kept)


class Kept:
    """Base class of handles that autograd saves in place of an activation; `again()` returns the activation."""

    def again(self) -> Tensor:
        """Return the activation that this handle stands for, with its original shape and device."""
        raise NotImplementedError(f"{type(self).__name__} must define again()")


class HostCopy:
    """Copy of an activation in host memory until the backward needs it; `tensor` is any view of the activation's data."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.device, self.here, self._event = tensor.device, whole, None
        self.is_away = whole.is_cuda
        if self.is_away:
            side = _side(whole.device)
            side.wait_stream(torch.cuda.current_stream(whole.device))
            with torch.cuda.stream(side):
                self.here = torch.empty_like(whole, device="cpu", pin_memory=True)
                self.here.copy_(whole, non_blocking=True)
            whole.record_stream(side)

    def begin(self) -> None:
        """Start the asynchronous copy of the activation from host to device; do nothing if the copy was started before."""
        if not self.is_away:
            return
        side, self.is_away = _side(self.device), False
        back = torch.empty(self.here.shape, dtype=torch.uint8, device=self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            back.copy_(self.here, non_blocking=True)
            self._event = side.record_event()
        back.record_stream(side)
        self.here = back

    def view(self, like: tuple[torch.dtype, Any, Any, int | torch.SymInt]) -> Tensor:
        """Return a view of the activation's memory on its device; kernels launched afterwards wait for the copy back.
        `like` gives the dtype, size, stride and storage offset of the view.
        """
        self.begin()
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        dtype, *layout = like
        found = torch.empty(0, dtype=dtype, device=self.device)
        return found.set_(self.here.untyped_storage(), layout[2], layout[0], layout[1])  # pyright: ignore[reportArgumentType]


@cache
def _side(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class Offloaded(Kept):
    """Handle that autograd saves in place of `tensor`, an activation of a module's `call`; `host` has its values."""

    def __init__(self, call: "Call", host: HostCopy, tensor: Tensor):
        self.call, self.host = call, host
        self.like = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def again(self) -> Tensor:
        """Return the activation on its device; start to copy back those of its module and of the module before it."""
        self.call.bring_back()
        return self.host.view(self.like)


class Call:
    """State of one forward of a module whose activations are offloaded to host memory.

    Args:
        path: path of the module.
        before: the offloaded call that ran before in the same forward; None for the first.
        notes: None, or for tests a list to which this call appends ("out", path) when it first copies to the host, and
            ("back", path) when it first copies back.
    """

    def __init__(self, path: str, before: "Call | None", notes: list[tuple[str, str]] | None):
        self.path, self.before, self.notes = path, before, notes
        self.copies: list[HostCopy] = []
        self._of_storage: dict[int, HostCopy] = {}
        self.is_back = False

    def take(self, tensor: Tensor) -> Offloaded:
        """Copy the memory of a tensor to the host, once for all views of it; return the handle that autograd saves instead."""
        storage = tensor.untyped_storage()
        key, found = storage._cdata, self._of_storage
        if not self.copies:
            self._note("out")
        if key not in found:
            found[key] = HostCopy(tensor)
            self.copies.append(found[key])
            weakref.finalize(storage, found.pop, key, None)  # its address may be reused
        return Offloaded(self, found[key], tensor)

    def bring_back(self) -> None:
        """Start to copy the activations of this call, and then of the call that ran before it, back to the device."""
        self._begin()
        if self.before is not None:
            self.before._begin()
            self.before = None

    def _begin(self) -> None:
        if self.copies and not self.is_back:
            self.is_back = True
            self._note("back")
            for one in self.copies:
                one.begin()

    def _note(self, what: str) -> None:
        if self.notes is not None:
            self.notes.append((what, self.path))


class Offloads:
    """Modules of one model whose activations are offloaded to host memory.

    Attributes:
        paths: paths of these modules, in model order.
        notes: None, or for tests the list that every `Call` gets as its `notes`.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.notes: list[tuple[str, str]] | None = None
        self._last: Call | None = None

    def call(self, path: str, module: nn.Module, keeps: Sequence[Pack]) -> AbstractContextManager:
        """Return a context for one forward of a module in which saved activations are offloaded to the host.

        Args:
            path: path of the module.
            module: the module; its parameters and buffers stay on the device.
            keeps: functions that get a tensor before it is copied, the last one first, and return the tensor itself, or
                an object that autograd saves in its place; then no more of them run and nothing is copied.
        """
        last, order = self._last, self.paths.index
        follows = last is not None and order(last.path) < order(path)
        call = self._last = Call(path, last if follows else None, self.notes)
        own = _storages(module)

        def pack(x: Tensor) -> Any:
            for keep in reversed(keeps):
                if (kept := keep(x)) is not x:
                    return kept
            is_small = x.untyped_storage().nbytes() < LEAST and self.notes is None
            stays = is_small or x.untyped_storage()._cdata in own or x.layout != torch.strided
            return x if stays else call.take(x)

        return saving(pack, unpack)


def unpack(kept: Any) -> Tensor:
    """Return the activation that autograd saved as `kept`, which is the tensor itself or a handle (Kept)."""
    return kept.again() if isinstance(kept, Kept) else kept


def _storages(module: nn.Module) -> set[int]:
    """Return ids of the storages of a module's parameters, buffers, and copies of parameters in the compute dtype."""
    found: set[int] = set()
    for part in module.modules():
        own = [*part._parameters.values(), *part._buffers.values()]
        own += [part.__dict__.get(name) for name in part._parameters]
        found |= {x.untyped_storage()._cdata for x in own if isinstance(x, Tensor)}
    return found


class Share(Kept):
    """Handle that autograd saves for `x`, equal on all tp ranks: 1/tp of its elements; `again()` all-gathers `x`."""

    def __init__(self, x: Tensor, mesh: Mesh):
        self.shape, self.group, self.size = x.shape, mesh.group("tp"), mesh.tp
        flat, each = x.detach().reshape(-1), -(-x.numel() // mesh.tp)
        mine = flat[mesh.coord("tp") * each :][:each]
        self.part = flat.new_zeros(each)
        self.part[: len(mine)].copy_(mine)

    def again(self) -> Tensor:
        """All-gather the saved activation over tp and return it in its original shape."""
        out = self.part.new_empty(self.size * len(self.part))
        all_gather_single(out, self.part, group=self.group)
        return out[: self.shape.numel()].view(self.shape)


def kept_in_shares(x: Any, mesh: Mesh, keeps: Sequence[Pack]) -> AbstractContextManager:
    """Return a context for one call in which autograd saves only 1/tp of the argument `x` on each tp rank.

    Args:
        x: the module's first argument, equal on all tp ranks; if it is no float tensor, the context does nothing.
        mesh: mesh with the tp group and the coordinates of this rank.
        keeps: pack functions (of torch's saved_tensors_hooks) for all other saved tensors, tried from the last to the
            first; the first handle that one of them returns is saved.
    """
    if mesh.tp == 1 or not (isinstance(x, Tensor) and x.is_floating_point()):
        return nullcontext()
    whole = x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset()

    def pack(kept: Tensor) -> Any:
        storage = kept.untyped_storage()._cdata
        if (storage, kept.shape, kept.stride(), kept.storage_offset()) == whole:
            with torch.no_grad():
                return Share(kept, mesh)
        return next((y for keep in reversed(keeps) if (y := keep(kept)) is not kept), kept)

    return saving(pack, unpack)
