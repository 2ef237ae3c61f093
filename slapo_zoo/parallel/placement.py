"""Placement: which elements of a sharded tensor a rank holds; load, save, reshard and verify all use it.

It computes with integers only, without tensors or process groups. `n` is the size of the mesh dim, `r` a coordinate.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive indices start..stop (exclusive) of the unsharded axis."""

    start: int
    stop: int


@dataclass(frozen=True)
class Placement:
    """Sharding of one axis of a tensor over one mesh dim, in whole units.

    rewrite:  w [..., size, ...]  -->  w_r [..., local_size(size, n, r), ...]

    Args:
        axis: axis of the tensor that is sharded.
        mesh_dim: mesh dim over which it is sharded.
        groups: sizes of consecutive groups of indices of the axis; every rank gets a share of each group. q|k|v of a
            fused projection is (E, E, E). Empty: the axis is one group.
        unit: number of consecutive indices of a group on one rank, e.g. head_dim; ranks differ by one at most.
        pad: True if every rank holds ceil(units / n) units; indices beyond the end are filled with zeros.
        replicate: True if, with fewer units than ranks, neighbouring ranks hold the same unit (KV heads).
        together: number of query heads (units) per KV head. A rank holds all query heads of some KV heads or, with more
            ranks than KV heads, an equal share of one KV head's query heads. With `groups` this holds for the first
            group (q); the others (k, v) have one unit per KV head, and n is at most the number of KV heads.
        shared: number of last indices of the axis that are no part of `groups`, 0 for none: k and v of the only KV
            head, which all ranks need. Their weights are sharded evenly; each rank computes its part and gathers.
    """

    axis: int
    mesh_dim: str = "tp"
    groups: tuple[int, ...] = ()
    unit: int = 1
    pad: bool = False
    replicate: bool = False
    together: int = 1
    shared: int = 0

    def units(self, size: int) -> list[int]:
        """Return the number of units (runs of `unit` indices, never split) in each group (e.g. q, k, v) of an axis."""
        return [group // self.unit for group in self._groups(size)]

    def _groups(self, size: int) -> tuple[int, ...]:
        return self.groups or (size - self.shared,)

    def problem(self, size: int, n: int) -> str:
        """Return the reason why an axis of length `size` cannot be sharded over `n` ranks; "" if it can."""
        groups = self._groups(size)
        if self.shared and (self.groups or self.pad or self.replicate or self.shared < n):
            return f"the last {self.shared} indices, which all ranks need, cannot be sharded over {self.mesh_dim}={n}: {n} or more are needed, without groups and padding"
        if sum(groups) + self.shared != size:
            return f"axis {self.axis} has size {size}, but groups {groups} add up to {sum(groups)}"
        if any(group % self.unit for group in groups):
            return f"group sizes {groups} are not multiples of unit {self.unit}"
        if self.pad and len(groups) > 1:
            return f"only an axis of one group can be padded, found {len(groups)} groups"
        if self.together > 1:
            first, *others = self.units(size)
            return self._together_problem(first, n) or self._beside_problem(first, others, n)
        fewest = min(self.units(size))
        if fewest < n and not self.pad and not self.replicate:
            return f"{fewest} units of {self.unit} cannot be sharded over {self.mesh_dim}={n}: each rank needs a unit of {self.unit} indices of axis {self.axis}"
        return ""

    def _together_problem(self, units: int, n: int) -> str:
        runs, rest = divmod(units, self.together)
        if rest:
            return f"found {units} query heads, expected a multiple of the {self.together} query heads per KV head"
        if runs < n and (n % runs or self.together % (n // runs)):
            return f"{runs} KV heads of {self.together} query heads cannot be sharded over {self.mesh_dim}={n}: each rank needs whole KV heads, or an equal part of the query heads of one"
        return ""

    def _beside_problem(self, units: int, others: list[int], n: int) -> str:
        runs = units // self.together
        if any(other != runs for other in others):
            return f"the groups after the first (k, v) have {others} heads, expected {runs}, one per {self.together} query heads"
        if others and runs < n:
            return f"{runs} units of {self.unit} cannot be sharded over {self.mesh_dim}={n}: each rank needs a unit of each group"
        return ""

    def runs(self, size: int, n: int, r: int) -> list[Run]:
        """Return the ranges of indices of an axis of length `size` that rank `r` of `n` holds, in shard order."""
        runs, start = [], 0
        for group, units in zip(self._groups(size), self.units(size), strict=True):
            beside = start > 0 and self.together > 1
            first, last = _balanced(units, n, r) if beside else self._share(units, n, r)
            runs.append(Run(start + first * self.unit, start + last * self.unit))
            start += group
        first, last = _balanced(self.shared, n, r)
        runs.append(Run(start + first, start + last))
        return [run for run in runs if run.stop > run.start]

    def owned(self, size: int, n: int, r: int) -> list[tuple[Run, int]]:
        """Return what rank `r` of `n` saves and sends to other ranks: pairs (range of the axis, its start in the shard).

        `size` is the unsharded length. If several ranks hold a range (KV heads), only the first of them lists it.
        """
        before = {run for rank in range(r) for run in self.runs(size, n, rank)}
        found: list[tuple[Run, int]] = []
        offset = 0
        for run in self.runs(size, n, r):
            if run not in before:
                found.append((run, offset))
            offset += run.stop - run.start
        return found

    def _share(self, units: int, n: int, r: int) -> tuple[int, int]:
        """Return (number of the first unit, number after the last) that rank `r` of `n` holds of `units` units of the axis."""
        if self.pad:
            share = -(-units // n)
            return min(r * share, units), min((r + 1) * share, units)
        if self.together > 1 and units // self.together >= n:
            first, last = _balanced(units // self.together, n, r)
            return first * self.together, last * self.together
        if self.replicate and units < n:
            return r * units // n, r * units // n + 1
        return _balanced(units, n, r)

    def local_size(self, size: int, n: int, r: int) -> int:
        """Return the length on rank `r` of `n`, padding included, of an axis of unsharded length `size`."""
        if self.pad:
            return -(-self.units(size)[0] // n) * self.unit
        return sum(run.stop - run.start for run in self.runs(size, n, r))

    def replicas(self, size: int, n: int, r: int) -> int:
        """Return how many of `n` ranks hold the same shard of an axis of length `size` as rank `r`; 1 except for KV heads."""
        mine = self.runs(size, n, r)
        return sum(self.runs(size, n, other) == mine for other in range(n))

    def local_shape(self, shape: tuple[int, ...], n: int, r: int) -> tuple[int, ...]:
        """Return the shape of the shard that rank `r` of `n` holds of a tensor of unsharded `shape`."""
        local = list(shape)
        local[self.axis] = self.local_size(shape[self.axis], n, r)
        return tuple(local)


def _balanced(units: int, n: int, r: int) -> tuple[int, int]:
    """Return (first unit, one past the last) that rank `r` of `n` holds of `units` units (indices that stay together),
    spread evenly; the first ranks hold one more.
    """
    small, larger = divmod(units, n)
    return r * small + min(r, larger), (r + 1) * small + min(r + 1, larger)


@dataclass(frozen=True)
class HeldBy(Placement):
    """Placement of one expert's tensor: the rank that holds expert `index` has all of it, other ranks have nothing.

    rewrite:  w [size, ...]  -->  w_r [size, ...] where `index` is in of.runs(count, n, r), else [0, ...]
    why:      files hold one weight per expert, a model holds one weight for all experts

    Args:
        of: placement of the axis of experts; its `runs` are the ranges of experts that a rank holds.
        count: number of experts.
        index: index of the expert.
    """

    of: Placement = Placement(0)
    count: int = 1
    index: int = 0

    def problem(self, size: int, n: int) -> str:
        """Return the reason why the experts cannot be sharded over `n` ranks, whatever `size` is; "" if they can."""
        return self.of.problem(self.count, n)

    def offset(self, n: int, r: int) -> int | None:
        """Return the index of expert `index` among rank `r`'s experts (`n` ranks); None if another rank holds it."""
        passed = 0
        for start, stop in self.of.runs(self.count, n, r):
            if start <= self.index < stop:
                return passed + self.index - start
            passed += stop - start
        return None

    def _share(self, units: int, n: int, r: int) -> tuple[int, int]:
        return (0, units) if self.offset(n, r) is not None else (0, 0)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the unsharded `transformers` model, and how the mesh shards it.

    Args:
        name: name in the state dict of the `transformers` model.
        shape: unsharded shape.
        dtype: torch dtype name without the prefix, e.g. "float32".
        placement: how it is sharded; None when every rank of a stage holds all of it.
        stage: pp coordinate of the ranks that own (save) it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement | None = None
    stage: int = 0

    def local_shape(self, n: int, r: int) -> tuple[int, ...]:
        """Return the shape of what rank `r` of `n` holds of this tensor: a shard or, without a placement, all of it."""
        return self.placement.local_shape(self.shape, n, r) if self.placement else self.shape
