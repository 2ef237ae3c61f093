"""Where the elements of one tensor live: the one spec that load, save, reshard and verify use.

Only integers: no tensor, no process group. `n` is the size of the mesh dim, `r` our coordinate.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive indices start..stop of the global axis."""

    start: int
    stop: int


@dataclass(frozen=True)
class Placement:
    """One axis of a tensor is sharded over one mesh dim, in whole units.

    rewrite:  w [..., size, ...]  -->  w_r [..., local_size(size, n, r), ...]

    Args:
        axis: the axis of the tensor that is sharded.
        mesh_dim: the mesh dim it is sharded over.
        groups: sizes of consecutive groups along the axis, each divided by itself: q|k|v of a
            fused projection is (E, E, E). Empty: the axis is one group.
        unit: length of a run that stays whole, e.g. head_dim; ranks differ by at most one unit.
        pad: every rank holds ceil(units / n) units; what lies beyond the end is zeros.
        replicate: with fewer units than ranks, neighbouring ranks hold the same unit (KV heads).
        together: units that share a KV head: a rank holds whole runs of that many units, or, with
            more ranks than such runs, an equal part of one. It counts in the first group (q); the
            others (k, v) hold one unit for each such run, and then no run is divided.
        shared: length of the end of the axis, which all ranks use (k and v of the only KV head): it is
            divided element by element, and what is made of it joined.
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
        """Number of units of each group of an axis of `size`."""
        return [group // self.unit for group in self._groups(size)]

    def _groups(self, size: int) -> tuple[int, ...]:
        return self.groups or (size - self.shared,)

    def problem(self, size: int, n: int) -> str:
        """Return why an axis of `size` cannot be sharded over `n`, or the empty string."""
        groups = self._groups(size)
        if self.shared and (self.groups or self.pad or self.replicate or self.shared < n):
            return f"a shared end of {self.shared} cannot be sharded over {self.mesh_dim}={n}, with groups or padding"
        if sum(groups) + self.shared != size:
            return (
                f"axis {self.axis} has size {size}, but the groups {groups} add up to {sum(groups)}"
            )
        if any(group % self.unit for group in groups):
            return f"group sizes {groups} are not multiples of unit {self.unit}"
        if self.pad and len(groups) > 1:
            return "only an axis of one group can be padded"
        if self.together > 1:
            first, *others = self.units(size)
            return self._together_problem(first, n) or self._beside_problem(first, others, n)
        fewest = min(self.units(size))
        if fewest < n and not self.pad and not self.replicate:
            return f"{fewest} units of {self.unit} cannot be sharded over {self.mesh_dim}={n}"
        return ""

    def _together_problem(self, units: int, n: int) -> str:
        runs, rest = divmod(units, self.together)
        if rest:
            return f"{units} units are not a multiple of {self.together} that belong together"
        if runs < n and (n % runs or self.together % (n // runs)):
            return (
                f"{runs} runs of {self.together} units cannot be sharded over {self.mesh_dim}={n}"
            )
        return ""

    def _beside_problem(self, units: int, others: list[int], n: int) -> str:
        runs = units // self.together
        if any(other != runs for other in others):
            return f"groups of {others} units beside {runs} runs of {self.together}"
        if others and runs < n:
            return f"{runs} units of {self.unit} cannot be sharded over {self.mesh_dim}={n}"
        return ""

    def runs(self, size: int, n: int, r: int) -> list[Run]:
        """The global indices that rank `r` holds, in local order; padding is not among them."""
        runs, start = [], 0
        for group, units in zip(self._groups(size), self.units(size), strict=True):
            beside = start > 0 and self.together > 1
            first, last = _balanced(units, n, r) if beside else self._share(units, n, r)
            runs.append(Run(start + first * self.unit, start + last * self.unit))
            start += group
        first, last = _balanced(self.shared, n, r)
        runs.append(Run(start + first, start + last))
        return [run for run in runs if run.stop > run.start]

    def _share(self, units: int, n: int, r: int) -> tuple[int, int]:
        """First and one-past-last unit of rank `r` among `units`."""
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
        """Length of the axis on rank `r`, padding included."""
        if self.pad:
            return -(-self.units(size)[0] // n) * self.unit
        return sum(run.stop - run.start for run in self.runs(size, n, r))

    def replicas(self, size: int, n: int, r: int) -> int:
        """Return how many ranks hold the same elements as rank `r` (1 unless KV heads are replicated)."""
        mine = self.runs(size, n, r)
        return sum(self.runs(size, n, other) == mine for other in range(n))

    def local_shape(self, shape: tuple[int, ...], n: int, r: int) -> tuple[int, ...]:
        """Shape on rank `r` of a tensor of global `shape`."""
        local = list(shape)
        local[self.axis] = self.local_size(shape[self.axis], n, r)
        return tuple(local)


def _balanced(units: int, n: int, r: int) -> tuple[int, int]:
    """First and one-past-last of `units` on rank `r`; the first ranks hold one more."""
    small, larger = divmod(units, n)
    return r * small + min(r, larger), (r + 1) * small + min(r + 1, larger)


@dataclass(frozen=True)
class HeldBy(Placement):
    """The rank whose part of another axis holds `index` has the whole tensor, all others nothing.

    rewrite:  w [size, ...]  -->  w_r [size, ...] where `index` is in of.runs(count, n, r), else [0, ...]
    why:      files hold the weight of each expert by itself, a model holds those of all in one

    Args:
        of: how the other axis is sharded.
        count: size of that axis.
        index: on it.
    """

    of: Placement = Placement(0)
    count: int = 1
    index: int = 0

    def problem(self, size: int, n: int) -> str:
        """Return why the other axis cannot be sharded over `n`, or the empty string."""
        return self.of.problem(self.count, n)

    def offset(self, n: int, r: int) -> int | None:
        """Return the position of `index` in the shard of rank `r`, or None."""
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
    """One tensor of the unscheduled model, and how the mesh divides it.

    Args:
        name: its name in the state dict of the unscheduled `transformers` model.
        shape: its global shape.
        dtype: torch dtype name without the prefix, e.g. "float32".
        placement: how it is sharded, or None when every rank of a stage holds all of it.
        stage: the pipeline stage that owns (saves) it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement | None = None
    stage: int = 0

    def local_shape(self, n: int, r: int) -> tuple[int, ...]:
        """Return the shape on rank `r` of `n`."""
        return self.placement.local_shape(self.shape, n, r) if self.placement else self.shape
