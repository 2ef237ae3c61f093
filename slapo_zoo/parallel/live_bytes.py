"""Count of the bytes of live tensors by kind (e.g. "activations"), from every storage that an operation allocates."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "activations"
_KINDS: list[str] = [OTHER]


@contextmanager
def counted_as(kind: str) -> Iterator[None]:
    """Context in which `LiveBytes` counts new tensors as `kind`, a name such as "activations"."""
    _KINDS.append(kind)
    try:
        yield
    finally:
        _KINDS.pop()


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of tensors that were created under it and are still alive.

    Attributes:
        live: kind (a name given to `counted_as`, such as "activations") --> bytes now.
        at_peak: kind --> bytes at the moment of the largest total.
        peak: largest total in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self.peak = self._total = 0
        self._kind_of: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        old = {x.untyped_storage()._cdata for x in seen}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self._born(x.untyped_storage(), old)
        return out

    def note(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor as `kind` (e.g. "activations") from now on, if it was created under this mode."""
        storage = tensor.untyped_storage()
        if (before := self._kind_of.get(storage._cdata)) is not None:
            self.live[before] -= storage.nbytes()
            self.live[kind] += storage.nbytes()
            self._kind_of[storage._cdata] = kind

    def _born(self, storage: Any, old: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in old or key in self._kind_of:
            return
        self._kind_of[key] = _KINDS[-1]
        self.live[_KINDS[-1]] += size
        self._total += size
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, self.live.copy()
        weakref.finalize(storage, self._died, key, size)

    def _died(self, key: int, size: int) -> None:
        self.live[self._kind_of.pop(key)] -= size
        self._total -= size
