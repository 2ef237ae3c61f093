"""Meter of a device's work, operation by operation in a dry run: products, bytes, kernels.

Bytes are counted twice. *Eager*: every operation reads its inputs and writes its outputs. *Fused*: a chain
of element-wise operations is one kernel, so what only the chain uses never reaches memory; a reduction
(softmax, a norm, a sum) takes the chain before it into its kernel, and what comes after it begins a new one.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from slapo_zoo.planner.use import Product, Work

REDUCTIONS = (
    "softmax", "norm", "sum", "mean", "amax", "max", "min", "embedding", "nll_loss", "gather", "index", "cat",
    "cumsum", "argmax", "sort", "topk", "scatter", "var",
)  # fmt: skip


class Meter:
    """Running totals of the operations that it is told of."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.moved = self.ops = self.fused = self.launches = 0.0
        self.comm = self.collectives = 0.0
        self._pending: dict[int, int] = {}  # written by a chain that still runs: storage --> bytes
        self._read: set[int] = set()  # what the running chain has read already

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """Count one operation."""
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return  # a view
        self.ops += 1
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        product = product_of(func, args, kwargs, out)
        if product is not None:
            self.products.append(product)
            self.launches += 1
            self.settle([_key(t) for t in inputs])
            return
        self.moved += sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
        self._chain(func, inputs, outputs)

    def _chain(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for tensor in inputs:
            if _key(tensor) not in self._pending and _key(tensor) not in self._read:
                self.fused += _bytes(tensor)
                self._read.add(_key(tensor))
        name = str(func._overloadpacket)
        if any(word in name for word in REDUCTIONS):
            self.fused += sum(map(_bytes, outputs))
            self.launches += 1
            self._read.clear()
            return
        for tensor in outputs:
            self._pending[_key(tensor)] = _bytes(tensor)

    def settle(self, keys: list[int] | None = None) -> None:
        """Write what chains have made: that which a product reads, or at the end of a phase all."""
        for key in list(self._pending) if keys is None else keys:
            if key in self._pending:
                self.fused += self._pending.pop(key)
                self.launches += 1
        self._read.clear()

    def died(self, key: int) -> None:
        """A storage is gone: what a chain made and used up is never written."""
        self._pending.pop(key, None)
        self._read.discard(key)

    def now(self) -> tuple[float, ...]:
        """Return the totals so far."""
        return (len(self.products), self.moved, self.ops, self.fused, self.launches, self.comm,
                self.collectives)  # fmt: skip

    def between(self, begin: tuple[float, ...], end: tuple[float, ...]) -> Work:
        """The work between two moments."""
        products = tuple(self.products[int(begin[0]) : int(end[0])])
        return Work(products, *(b - a for a, b in zip(begin[1:], end[1:], strict=True)))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def product_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Product | None:
    """The matrix product, convolution or attention that an operation is, or None."""
    packet = func._overloadpacket
    name = str(packet)
    tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
    moved = float(sum(map(_bytes, tensors)))
    if "scaled_dot_product" in name:
        back = "backward" in name
        query, key = args[1 if back else 0], args[2 if back else 1]
        flops = (10.0 if back else 4.0) * query.numel() * key.shape[-2]
        batch = math.prod(query.shape[:-2])
        return Product(batch, query.shape[-2], 0, key.shape[-2], flops, moved)
    if packet not in flop_registry:
        return None
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    found = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
    if found.ndim == 3:
        batch, m, n = found.shape
    else:  # a convolution is a product of as many rows as it has places
        batch, n = 1, found.shape[1] if found.ndim > 1 else 1
        m = found.numel() / n
    k = flops / (2.0 * batch * m * n)
    return Product(batch, m, n, k, flops, moved)
