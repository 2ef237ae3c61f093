"""Meter: count matrix products, bytes and kernel launches of the operations on a tape.

Bytes are counted twice. *Eager*: every operation reads its inputs and writes its outputs. *Fused*: a chain
of element-wise operations is one kernel, so its intermediate tensors are never written. A reduction
(softmax, norm, sum) ends the chain and joins its kernel.
"""

from collections.abc import Iterable

from slapo_zoo.language.products import Product
from slapo_zoo.language.tape import Row, is_view
from slapo_zoo.tune.planner.peak_use import Work

REDUCTIONS = (
    "softmax", "norm", "sum", "mean", "amax", "max", "min", "embedding", "nll_loss", "gather", "index", "cat",
    "cumsum", "argmax", "sort", "topk", "scatter", "var",
)  # fmt: skip
# Bytes that one rank moves per byte of the whole tensor, on a ring of many ranks.
RING = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "send": 1.0}


class Meter:
    """Running totals of products, bytes, launches and collectives over noted operations."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.moved = self.ops = self.fused = self.launches = 0.0
        self.comm = self.collectives = 0.0
        self._pending: dict[int, int] = {}  # written by a chain that still runs: storage --> bytes
        self._read: set[int] = set()  # what the running chain has read already

    def note(self, row: Row) -> None:
        """Count one operation or collective of the tape."""
        if row.transfer is not None:
            self.comm += RING[row.transfer.kind] * row.transfer.bytes
            self.collectives += 1
        if isinstance(row.op, str) or is_view(row.op):
            return
        self.ops += 1
        if row.product is not None:
            self.products.append(row.product)
            self.launches += 1
            self.settle(ref.storage for ref in row.reads)
            return
        self.moved += sum(ref.nbytes for ref in (*row.reads, *row.writes))
        self._chain(row)

    def _chain(self, row: Row) -> None:
        for ref in row.reads:
            if ref.storage not in self._pending and ref.storage not in self._read:
                self.fused += ref.nbytes
                self._read.add(ref.storage)
        name = str(row.op._overloadpacket)
        if any(word in name for word in REDUCTIONS):
            self.fused += sum(ref.nbytes for ref in row.writes)
            self.launches += 1
            self._read.clear()
            return
        for ref in row.writes:
            self._pending[ref.storage] = ref.nbytes

    def settle(self, storages: Iterable[int] | None = None) -> None:
        """Count pending outputs of element-wise chains as written: those in `storages`, or all for None."""
        for key in list(self._pending) if storages is None else storages:
            if key in self._pending:
                self.fused += self._pending.pop(key)
                self.launches += 1
        self._read.clear()

    def died(self, storage: int) -> None:
        """Drop a released storage: a chain that made and consumed it never writes it to memory."""
        self._pending.pop(storage, None)
        self._read.discard(storage)

    def now(self) -> tuple[float, ...]:
        """Return the running totals, after counting all pending outputs as written."""
        self.settle()
        return (len(self.products), self.moved, self.ops, self.fused, self.launches, self.comm,
                self.collectives)  # fmt: skip

    def between(self, begin: tuple[float, ...], end: tuple[float, ...]) -> Work:
        """Return the work between two results of `now`."""
        products = tuple(self.products[int(begin[0]) : int(end[0])])
        return Work(products, *(b - a for a, b in zip(begin[1:], end[1:], strict=True)))
