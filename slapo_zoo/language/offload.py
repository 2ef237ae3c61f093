"""Offload activations that autograd keeps to host memory, and bring them back before their backward.

rewrite:  kept [...] on the device  -->  kept [...] in pinned memory of the host  -->  on the device again

Copies run on a stream of their own, beside the computation; the first backward that asks for one brings
back what its module kept, and begins to bring back what the module before it kept. On a CPU nothing is copied.
Source: Rhu et al. 2016, arXiv:1602.08124.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST = 64 << 10  # bytes of what is worth a copy
Pack = Callable[[Tensor], Any]  # a tensor that autograd keeps --> itself, or a Kept


class Kept:
    """Handle that autograd holds in place of an activation: its copy on the host, its shard, or how to gather it."""

    def again(self) -> Tensor:
        """Return the activation."""
        raise NotImplementedError


class Waiting:
    """The storage of an activation, copied to the host until the backward needs it.

    Args:
        tensor: any view of it.
    """

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # pyright: ignore[reportArgumentType]
        self.device, self.here, self._event = tensor.device, whole, None
        self.is_away = whole.is_cuda
        if self.is_away:
            side = _side(whole.device)
            side.wait_stream(torch.cuda.current_stream(whole.device))
            with torch.cuda.stream(side):
                self.here = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
                self.here.copy_(whole, non_blocking=True)
            whole.record_stream(side)

    def begin(self) -> None:
        """Start the copy from the host back to the device."""
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

    def view(self, like: tuple[torch.dtype, Any, Any, int]) -> Tensor:
        """Return a tensor of a dtype and layout over this storage, brought back to its device."""
        self.begin()
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        dtype, *layout = like
        found = torch.empty(0, dtype=dtype, device=self.device)
        return found.set_(self.here.untyped_storage(), layout[2], layout[0], layout[1])  # pyright: ignore[reportCallIssue, reportArgumentType]


@cache
def _side(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class Offloaded(Kept):
    """One activation of a module's call that lies on the host."""

    def __init__(self, call: "Call", waiting: Waiting, tensor: Tensor):
        self.call, self.waiting = call, waiting
        self.like = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def again(self) -> Tensor:
        """Return the activation, and start to bring back the others of its module."""
        self.call.bring_back()
        return self.waiting.view(self.like)


class Call:
    """One forward of a module, and what it kept.

    Args:
        path: of the module.
        before: the call that ran before it in the same forward.
        notes: where ("out" or "back", path) is written, in order.
    """

    def __init__(self, path: str, before: "Call | None", notes: list[tuple[str, str]] | None):
        self.path, self.before, self.notes = path, before, notes
        self.waiting: list[Waiting] = []
        self._of_storage: dict[int, Waiting] = {}
        self.is_back = False

    def take(self, tensor: Tensor) -> Offloaded:
        """Send a tensor to the host, once for all views of it."""
        storage = tensor.untyped_storage()
        key, found = storage._cdata, self._of_storage
        if not self.waiting:
            self._note("out")
        if key not in found:
            found[key] = Waiting(tensor)
            self.waiting.append(found[key])
            weakref.finalize(storage, found.pop, key, None)  # another one may get its place
        return Offloaded(self, found[key], tensor)

    def bring_back(self) -> None:
        """Start to bring back what this call kept, and then what the one before it kept."""
        self._begin()
        if self.before is not None:
            self.before._begin()
            self.before = None

    def _begin(self) -> None:
        if self.waiting and not self.is_back:
            self.is_back = True
            self._note("back")
            for one in self.waiting:
                one.begin()

    def _note(self, what: str) -> None:
        if self.notes is not None:
            self.notes.append((what, self.path))


class Offloads:
    """The modules of one model whose activations wait on the host.

    Attributes:
        notes: a list to write the order of copies into, or None.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.notes: list[tuple[str, str]] | None = None
        self._last: Call | None = None

    def call(self, path: str, module: nn.Module, keeps: Sequence[Pack]) -> AbstractContextManager:
        """Return the context of one forward: what autograd saves in it is offloaded.

        Args:
            path: of the module.
            module: whose parameters stay where they are.
            keeps: what is asked first: it may keep a tensor in a way of its own.
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

        return saved_tensors_hooks(pack, unpack)


def unpack(kept: Any) -> Tensor:
    """Return the tensor that autograd asks for again."""
    return kept.again() if isinstance(kept, Kept) else kept


def _storages(module: nn.Module) -> set[int]:
    """Return the ids of a module's parameters, and of tensors that it reads in their place."""
    found: set[int] = set()
    for part in module.modules():
        own = [*part._parameters.values(), *part._buffers.values()]
        own += [part.__dict__.get(name) for name in part._parameters]
        found |= {x.untyped_storage()._cdata for x in own if isinstance(x, Tensor)}
    return found
