"""Memory and work of a training step, read from a record (tape) of all its operations.

Every storage is followed from its allocation to its release, so temporaries, the loss and gradients count. Bytes that
are moved are counted in two ways. *Eager*: every operation reads its inputs and writes its outputs. *Fused*: a chain of
element-wise operations is one kernel, so its intermediate tensors are never written. A reduction (softmax, norm, sum)
ends the chain and joins its kernel.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from slapo_zoo.language.primitives.checkpoint import POLICIES
from slapo_zoo.language.tape import (
    ENTER,
    FREE,
    GRADIENT,
    LEAVE,
    LOSS,
    SUMMED,
    Product,
    Ref,
    Row,
    is_view,
)
from slapo_zoo.tune.planner.profile import Use, Work

MATMULS = POLICIES["save_matmuls"]
ADD = torch.ops.aten.add.Tensor
REDUCTIONS = (
    "softmax", "norm", "sum", "mean", "amax", "max", "min", "embedding", "nll_loss", "gather", "index", "cat",
    "cumsum", "argmax", "sort", "topk", "scatter", "var",
)  # fmt: skip
# Bytes that one rank moves per byte of the whole tensor, on a ring of many ranks.
RING = {
    "all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "send": 1.0, "shift": 1.0,
}  # fmt: skip


class Meter:
    """Running totals over recorded operations: matrix products, bytes, kernel launches and collectives."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.moved = self.ops = self.fused = self.launches = 0.0
        self.comm = self.collectives = self.cut_comm = self.cut_collectives = 0.0
        self.exchanged = 0.0
        self._pending: dict[int, int] = {}  # storage written by the current chain --> bytes
        self._read: set[int] = set()  # storages that the current chain has read

    def note(self, row: Row) -> None:
        """Add `row`, one operator or collective of a recorded step, to this meter's totals (the fields of `Work`)."""
        if row.transfer is not None:
            sent = RING[row.transfer.kind] * row.transfer.bytes
            over_tp = row.transfer.mesh_dim == "tp"
            self.comm, self.collectives = self.comm + sent * over_tp, self.collectives + over_tp
            self.cut_comm += sent * (not over_tp)
            self.cut_collectives += not over_tp
            self.exchanged += sent * (not over_tp and row.transfer.kind == "all_to_all")
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
        """End fused element-wise chains with outputs in `storages` (ids; None: all), and add these to the bytes moved."""
        for key in list(self._pending) if storages is None else storages:
            if key in self._pending:
                self.fused += self._pending.pop(key)
                self.launches += 1
        self._read.clear()

    def died(self, storage: int) -> None:
        """Forget the freed storage with id `storage`; an output in it that only its fused chain read moves no bytes."""
        self._pending.pop(storage, None)
        self._read.discard(storage)

    def now(self) -> tuple[float, ...]:
        """Return the totals so far, of which `between` subtracts two: number of matrix products, then the fields of
        `Work` from `moved` on. Element-wise chains are ended first, which adds their outputs to the bytes moved.
        """
        self.settle()
        return (len(self.products), self.moved, self.ops, self.fused, self.launches, self.comm,
                self.collectives, self.cut_comm, self.cut_collectives, self.exchanged)  # fmt: skip

    def between(self, begin: tuple[float, ...], end: tuple[float, ...]) -> Work:
        """Return the work that was counted between two calls of `now`, whose results are `begin` and `end`."""
        products = tuple(self.products[int(begin[0]) : int(end[0])])
        return Work(products, *(b - a for a, b in zip(begin[1:], end[1:], strict=True)))


class Alive(NamedTuple):
    """Allocated storage in a dry run.

    Args:
        size: bytes.
        call: index of the call (of a block, embedding or head) during or before which the storage was allocated.
        inside: whether the storage was allocated during that call, not before it.
    """

    size: int
    call: int
    inside: bool


class Moment(NamedTuple):
    """Memory and work of a dry run at one point.

    Args:
        work: totals since the start, from `Meter.now`.
        gathered: bytes all-gathered over tp since the start.
        peak: most bytes in use since the previous `Moment`, without gradients of parameters.
        grown: most bytes in use since the previous `Moment`, gradients of parameters included.
        gradients: bytes of gradients of parameters at this point.
        matmuls: bytes of results of matrix products since the previous `Moment`.
        output: bytes of the output of the block, embedding or head that ends at this point; 0 if none does.
    """

    work: tuple[float, ...]
    gathered: int
    peak: int
    grown: int
    gradients: int
    matmuls: int = 0
    output: int = 0


class Footprint:
    """Memory and work of every call of a unit (block, embedding, head) in one recorded step; `uses()` returns them.

    Args:
        rows: the events of a `Tape` of the step: operators, collectives, begin and end of calls, freed memory.
        last: path of the unit that runs last; the work of the loss is added to that of this unit.
    """

    def __init__(self, rows: Sequence[Row], last: str):
        self.live = self.peak = self.grown = self.gradients = self.matmuls = self.gathered = 0
        self.meter, self.last = Meter(), last
        self.alive: dict[int, Alive] = {}
        self.attention: dict[int, tuple[Work, float]] = {}  # unit call --> that of its attentions
        self.kept: list[tuple[int, int]] = []  # by unit call: see `_survivors`
        self.units: list[str] = []
        self.ends: list[Moment] = []
        self.begins: dict[int, Moment] = {}
        self._returned: set[int] = set()
        self._begun: list[tuple[tuple[float, ...], int]] = []
        for row in rows:
            self._follow(row)

    def _follow(self, row: Row) -> None:
        if row.op == LEAVE:
            self._unit_ends(row) if row.output is not None else self._attention_ends(row)
        elif row.op == ENTER:
            self._begun.append((self.meter.now(), self.live))
        elif row.op == GRADIENT and self.units[int(row.amount)] != self.last:
            if row.amount not in self.begins:
                self.begins[int(row.amount)] = self._now()
        elif row.op == LOSS:
            self.kept = self._survivors()
            self.ends[-1] = self._now()  # the loss belongs to the last unit
        elif row.op == FREE:
            self._died(int(row.amount))
        elif row.op == SUMMED:
            self._summed(row.reads[0].storage)
        else:
            self._computed(row)

    def _computed(self, row: Row) -> None:
        self.meter.note(row)
        if row.op == "all_gather" and row.transfer and row.transfer.mesh_dim == "tp":
            self.gathered += int(row.amount)
        over = self._summed_in_place(row)
        for ref in row.writes:
            self._born(ref, over, row.unit)
        if row.op in MATMULS:
            self.matmuls += sum(ref.nbytes for ref in row.writes)

    def _now(self, output: int = 0) -> Moment:
        found = Moment(self.meter.now(), self.gathered, self.peak, self.grown, self.gradients,
                       self.matmuls, output)  # fmt: skip
        self.peak, self.grown, self.matmuls = self.live, self.live + self.gradients, 0
        return found

    def _unit_ends(self, row: Row) -> None:
        new = [ref for ref in row.writes if ref.storage not in self._returned]
        self._returned |= {ref.storage for ref in new}
        self.units.append(row.path)
        self.ends.append(self._now(sum(ref.nbytes for ref in new)))

    def _attention_ends(self, row: Row) -> None:
        """Add to `self.attention`, for the unit that runs, the Work since the attention began, and the bytes that it
        leaves allocated besides q, k, v and its output. `row` is the event that ends the attention call.
        """
        begin, live = self._begun.pop()
        result = sum(ref.nbytes for ref in (*row.reads[:3], *row.writes))
        work, kept = self.attention.get(len(self.ends), (Work(), 0.0))
        work = work.plus(self.meter.between(begin, self.meter.now()))
        self.attention[len(self.ends)] = work, kept + max(self.live - live - result, 0.0)

    def _survivors(self) -> list[tuple[int, int]]:
        """Return, per call of a unit (block, embedding, head), (bytes kept for the backward that were allocated between
        the end of the previous call and of this one, the part of them that was allocated before this call began).
        """
        found, before = [0] * len(self.ends), [0] * len(self.ends)
        for storage in self.alive.values():
            at = min(storage.call, len(found) - 1)
            found[at] += storage.size
            before[at] += storage.size * (not storage.inside)
        return list(zip(found, before, strict=True))

    def _summed_in_place(self, row: Row) -> int | None:
        """Return the id of the storage to which a recorded operation of autograd, `row`, adds a gradient; None for any
        other operation. Autograd adds real gradients in place, but on fake tensors allocates a new gradient.
        """
        if row.op is not ADD or not row.backward:
            return None
        same = len(row.reads) == 2 and row.reads[0].shape == row.reads[1].shape
        return row.reads[0].storage if same and row.reads[0].storage in self.alive else None

    def _born(self, ref: Ref, over: int | None, unit: str) -> None:
        if ref.storage in self.alive or ref.storage < 0:
            return
        if over is not None:
            self.alive[ref.storage] = self.alive[over]
            self.alive[over] = self.alive[over]._replace(size=0)
            return
        self.alive[ref.storage] = Alive(ref.size, len(self.ends), bool(unit))
        self.live += ref.size
        self.peak = max(self.peak, self.live)
        self.grown = max(self.grown, self.live + self.gradients)

    def _died(self, storage: int) -> None:
        self._returned.discard(storage)
        self.meter.died(storage)
        if storage in self.alive:
            self.live -= self.alive.pop(storage).size

    def _summed(self, storage: int) -> None:
        """Move the bytes of a parameter's gradient, the storage with id `storage`, once from `live` to `gradients`."""
        if storage in self.alive:
            self.live -= self.alive[storage].size
            self.gradients += self.alive[storage].size
            self.alive[storage] = self.alive[storage]._replace(size=0)

    def uses(self) -> list[tuple[str, Use]]:
        """Return (path of the module, cost) of each call of a block, embedding or head, in the order of the forward."""
        found, below = [], 0
        begun, gathered = Meter().now(), 0
        end_of_step = self._now()
        begins = {**self.begins, len(self.ends) - 1: self.ends[-1]}
        after = {i: begins[j] for i, j in itertools.pairwise(sorted(begins, reverse=True))}
        between = self.meter.between
        for i, end in enumerate(self.ends):
            first, last = begins.get(i), after.get(i, end_of_step)
            attention, apart = self.attention.get(i, (Work(), 0.0))
            kept, before = self.kept[i]
            found.append(Use(
                between(begun, end.work), between(first.work, last.work) if first else Work(), attention,
                kept, apart, end.gathered - gathered, end.matmuls, end.output,
                forward_peak=end.peak - below,
                backward_peak=last.peak - below if first else 0.0,
                backward_growth=last.grown - first.gradients - below if first else 0.0,
                before=before,
            ))  # fmt: skip
            begun, gathered, below = end.work, end.gathered, below + kept
        return list(zip(self.units, found, strict=True))


def parameter_bytes(
    model: Any, units: list[str]
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, frozenset[str]]]]:
    """Return the bytes of a model's parameters by unit (block, embedding or head; `units` are their paths).

    Returns:
        {unit: (bytes of the parameters that no other unit has, bytes of the largest one)}, with those outside all units
        in the first, and [(bytes of a parameter, paths of the units that share it)] for parameters of several units.
    """
    holders: dict[int, tuple[int, set[str]]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = next((u for u in units if name == u or name.startswith(f"{u}.")), units[0])
        holders.setdefault(id(p), (p.nbytes, set()))[1].add(unit)
    sizes = {unit: [0, 0] for unit in units}
    shared = []
    for size, names in holders.values():
        if len(names) > 1:
            shared.append((size, frozenset(names)))
            continue
        (unit,) = names
        sizes[unit][0] += size
        sizes[unit][1] = max(sizes[unit][1], size)
    return {unit: (own, most) for unit, (own, most) in sizes.items()}, shared
