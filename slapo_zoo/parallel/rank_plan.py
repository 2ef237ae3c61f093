"""Plan of a rank: for each tensor, which ranks hold it, which sum its gradient, and which of them writes it to files.

A plan is plain data: it needs no process, no weights and no device. Its rows, one per tensor, are the same
on all ranks; `RankPlan.mesh` says to which rank the plan belongs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slapo_zoo.parallel.digests import digest
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec

PARTIAL, REPLICAS, TIED, DATA = "partial", "kv replicas", "tied stages", "data parallel"


@dataclass(frozen=True)
class Sum:
    """Ranks over which the gradient of a tensor has to be summed.

    Args:
        mesh_dim: mesh dim along which these ranks lie.
        why: PARTIAL (each rank sees a part of the activations), REPLICAS (neighbours hold the same KV
            heads), TIED (several stages use the tensor), or DATA (each rank sees other rows).
        parts: groups of coordinates on the mesh dim; each group sums among its own members only. Empty: all
            ranks of the dim sum together.
        if_tokens_sharded: True if the sum is needed only in a step with tokens sharded over tp (sequence parallelism).
    """

    mesh_dim: str
    why: str
    parts: tuple[tuple[int, ...], ...] = ()
    if_tokens_sharded: bool = False

    def ranks(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the global ranks that sum the gradient together with `mesh.rank`, itself included; at least (mesh.rank,)."""
        here = mesh.coord(self.mesh_dim)
        all_of_dim = tuple(range(mesh.size(self.mesh_dim)))
        part = next((p for p in self.parts or (all_of_dim,) if here in p), (here,))
        return tuple(mesh.at(**{self.mesh_dim: coord}) for coord in part)

    def __str__(self) -> str:
        parts = " ".join("+".join(map(str, part)) for part in self.parts)
        tokens = " if tokens are sharded" if self.if_tokens_sharded else ""
        return f"{self.mesh_dim}{' ' if parts else ''}{parts} ({self.why}){tokens}"


@dataclass(frozen=True)
class TensorPlan(TensorSpec):
    """Plan of one tensor of the model: its shards, gradient sums, owner and name in files.

    The pipeline stage `stage`, the first of `stages`, owns the tensor: counts it in gradient norms, writes it to files.

    Args:
        stages: pp coordinates that hold the tensor.
        row_shards: number of dp ranks over which ZeRO shards the local tensor along axis 0; 1 without ZeRO.
        sum_over: groups of ranks over which its gradient is summed, one after the other; empty for a buffer.
        tied_to: name of the tensor under whose name this one is saved, or "".
        is_parameter: True if the tensor may take a gradient.
        adapter: name of the peft adapter whose files hold it, or "" for the model's own files.
    """

    stages: tuple[int, ...] = (0,)
    row_shards: int = 1
    sum_over: tuple[Sum, ...] = ()
    tied_to: str = ""
    is_parameter: bool = True
    adapter: str = ""

    def sums(self, tokens_sharded: bool, *why: str) -> list[Sum]:
        """Return the groups of ranks over which the tensor's gradient is summed in a step, one after the other.

        Args:
            tokens_sharded: True in a step with sequence parallelism.
            why: kinds of sums (PARTIAL over tp, REPLICAS of KV heads, TIED over stages, DATA over dp); empty: all.
        """
        return [
            one for one in self.sum_over
            if (tokens_sharded or not one.if_tokens_sharded) and (not why or one.why in why)
        ]  # fmt: skip

    def replicas(self, mesh: Mesh) -> int:
        """Return how many tp ranks hold the same elements of this tensor as `mesh.rank` holds, itself included."""
        if self.placement is None:
            return mesh.tp
        size = self.shape[self.placement.axis]
        return self.placement.replicas(size, mesh.tp, mesh.coord("tp"))

    def held_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the shard on `mesh.rank`, over tp and, with `dp_shard` (ZeRO-3), over dp along axis 0."""
        shape = self.local_shape(mesh.tp, mesh.coord("tp"))
        if self.row_shards == 1 or not shape or not self.is_parameter:
            return shape
        rows = -(-shape[0] // self.row_shards)
        first = min(mesh.coord("loss") % self.row_shards * rows, shape[0])
        return (min(rows, shape[0] - first), *shape[1:])

    def place(self) -> str:
        """Return how the tensor is sharded, as text such as "tp: axis 0"; "replicated" if it is not sharded."""
        found = []
        if self.placement is not None:
            found.append(f"{self.placement.mesh_dim}: axis {self.placement.axis}")
        if self.row_shards > 1 and self.is_parameter:
            found.append(f"dp: rows over {self.row_shards}")
        return ", ".join(found) or "replicated"


@dataclass(frozen=True)
class RankPlan:
    """Plan of one rank: one row per tensor says how it is sharded; printing shows a table.

    Args:
        mesh: sizes of the mesh dims, and the rank.
        tensors: name in the state dict --> plan, for every tensor of the whole model, in the model's order.
        units: paths of the modules (blocks, embeddings, heads) that this rank's pipeline stages run.
        cuts: path of each module after which a pipeline stage ends; "PATH, call N" if the model calls it several times.
        sites: path of a module of this rank that draws random numbers --> text how it is seeded (`fork_rng`, ...).
    """

    mesh: Mesh
    tensors: Mapping[str, TensorPlan]
    units: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    sites: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> TensorPlan | None:
        """Return the plan (sharding, gradient sums) of the parameter or buffer `name`; None if no tensor has this name."""
        return self.tensors.get(name) or self.tensors.get(without_peft(name))

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's tp shard of a tensor, unsharded over dp."""
        row = self.of(name)
        assert row is not None  # noqa: S101 - callers ask for what dp ranks divide
        return row.local_shape(self.mesh.tp, self.mesh.coord("tp"))

    def saved_as(self, name: str) -> str:
        """Return the name under which files hold a tensor; tied tensors are saved under one name."""
        return row.tied_to or row.name if (row := self.of(name)) else name

    def ties(self) -> list[list[str]]:
        """Return a list of names for each tied tensor; the name under which it is saved comes first."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            found.setdefault(self.saved_as(name), []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def sharded(self, name: str) -> TensorPlan | None:
        """Return a tensor's plan if its placement shards it over a mesh dim of more than one rank, else None."""
        row = self.of(name)
        cut = row and row.placement
        return row if cut and self.mesh.size(cut.mesh_dim) > 1 else None

    @property
    def saved(self) -> list[TensorPlan]:
        """Return one plan per tensor of a checkpoint, in order: each tied tensor once, no tensors of peft adapters."""
        return [row for row in self.tensors.values() if not row.tied_to and not row.adapter]

    def mine(self) -> Iterator[TensorPlan]:
        """Yield the plan of each tensor on this rank's pipeline stage, also of tied weights that another saves."""
        here = self.mesh.coord("pp")
        yield from (row for row in self.tensors.values() if here in row.stages)

    def owns(self, name: str) -> bool:
        """Return whether this rank's stage owns (saves) the tensor `name`; True for tensors that a user added."""
        row = self.of(name)
        return row is None or row.stage == self.mesh.coord("pp")

    def having(self, rows: Sequence[TensorPlan]) -> "RankPlan":
        """Return a copy of this plan with `rows`, plans of single tensors, which replace those of the same names."""
        return replace(self, tensors={**self.tensors, **{row.name: row for row in rows}})

    def groups(self) -> list[tuple[int, ...]]:
        """Return all groups of global ranks that sum a gradient and are a part of a mesh dim's ranks."""
        sums = {one for row in self.tensors.values() for one in row.sum_over if one.parts}
        meshes = [self.mesh.seen_by(rank) for rank in range(self.mesh.world_size)]
        found = {one.ranks(mesh) for one in sums for mesh in meshes}
        return sorted(ranks for ranks in found if len(ranks) > 1)

    def sums_of(
        self, names: Iterable[str], *why: str, tokens_sharded: bool = True
    ) -> dict[Sum, list[str]]:
        """Return {Sum, a set of ranks: those of `names` whose gradients these ranks sum}, in the same order on all
        ranks. `why` selects kinds of sums (PARTIAL, REPLICAS, TIED, DATA; empty: all); `tokens_sharded` False leaves
        out the sums that only sequence parallelism needs.
        """
        places = {name: i for i, name in enumerate(self.tensors)}
        rows = [self.tensors[name] for name in names if name in self.tensors]
        found: dict[Sum, list[str]] = {}
        for row in sorted(rows, key=lambda row: places[row.tied_to or row.name]):
            for one in row.sums(tokens_sharded, *why):
                if len(one.ranks(self.mesh)) > 1:
                    found.setdefault(one, []).append(row.name)
        return found

    def digest(self) -> str:
        """Return a SHA-256 of mesh sizes, tensors and pipeline cuts, which must be equal on all ranks."""
        sizes = tuple(
            self.mesh.size(mesh_dim)
            for mesh_dim, _ in self.mesh.DIMS
            if mesh_dim in self.mesh.sizes
        )
        told = repr((sizes, tuple(self.tensors.values()), self.cuts))
        return digest(told)

    def __str__(self) -> str:
        mesh, here = self.mesh, self.mesh.coord("pp")
        sizes = " ".join(f"{mesh_dim}={size}" for mesh_dim, size in mesh.sizes.items())
        head = f"rank {mesh.rank} of {sizes}: stage {here}, {len(self.units)} units"
        lines = [head, f"plan {self.digest()[:12]}"]
        for row in self.mine():
            sums = "; ".join(str(one) for one in row.sum_over if len(one.ranks(mesh)) > 1)
            who = f"is {row.tied_to}" if row.tied_to else "" if row.stage == here else f"written by stage {row.stage}"  # fmt: skip
            told = [f"{row.name} {list(row.shape)} -> {list(row.held_shape(mesh))} {row.dtype}",
                    row.place(), f"sum over {sums}" if sums else "", who]  # fmt: skip
            lines.append("  " + " | ".join(part for part in told if part))
        lines += [f"  draws: {path} {directive}" for path, directive in self.sites.items()]
        return "\n".join(lines)


def without_peft(name: str) -> str:
    """Return a tensor's name in the model without peft, whose wrapper modules add segments to names."""
    return name.replace(".base_layer.", ".")


def partition(coords: Sequence[int], same: Mapping[int, object]) -> tuple[tuple[int, ...], ...]:
    """Group the mesh coordinates `coords` that `same` (coordinate --> which elements its rank holds) maps to equal values.

    >>> partition(range(4), {0: "a", 1: "a", 2: "b", 3: "b"})
    ((0, 1), (2, 3))
    """
    found: dict[object, list[int]] = {}
    for coord in coords:
        found.setdefault(same[coord], []).append(coord)
    return tuple(tuple(part) for part in found.values())
