"""The device mesh: dims tp (fastest), cp, dp, pp; any rank can be inspected without a process group.

`Mesh.DIMS` says what the ranks of each mesh dim divide among them. "batch" and "loss" are names for several dims taken
together, as in torchtitan: the dims that divide a batch's rows, and those that divide its rows or tokens.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from slapo_zoo.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

# Name for several mesh dims together --> what their ranks share out: see MeshDim.
ROLES = {"batch": {"rows"}, "loss": {"rows", "tokens"}}
ALWAYS = ("tp", "pp", "dp")  # listed even if their size is 1


class MeshDim(NamedTuple):
    """A mesh dim, and what its ranks divide among them.

    Args:
        name: name of the field of `Mesh` that holds its size.
        divides: "layers", "rows" (of the batch), "tokens" (of each row) or "parameters". With rows and tokens all
            ranks hold the same parameters, each computes a part of the loss, and gradients are summed over the ranks.
    """

    name: str
    divides: Literal["layers", "rows", "tokens", "parameters"]


class ShapeOnlyGroup(NamedTuple):
    """Replacement of a process group in a dry run (a step on fake tensors): collectives only change shapes.

    Args:
        size: number of ranks.
        rank: this rank's index in the group.
        note: function called with the kind and the bytes of each collective, or None.
    """

    size: int
    rank: int
    note: "Callable[[str, int], None] | None" = None


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh dims, and one rank with its coordinates.

    rank = ((pp_coord * dp + dp_coord) * cp + cp_coord) * tp + tp_coord

    Args:
        tp: number of ranks that shard each layer.
        pp: number of ranks that shard the layers into stages.
        dp: number of ranks that shard the batch.
        rank: the global rank.
        dry_run: True for a step on fake tensors: no process group, and collectives only change shapes.
        cp: number of ranks that shard the tokens of each row (context parallelism).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    rank: int = 0
    dry_run: bool = False
    cp: int = 1

    # slowest to fastest: tp peers are neighbours, as in Megatron-LM
    DIMS: ClassVar[tuple[MeshDim, ...]] = (
        MeshDim("pp", "layers"), MeshDim("dp", "rows"), MeshDim("cp", "tokens"), MeshDim("tp", "parameters"),
    )  # fmt: skip

    def __post_init__(self):
        stride, places = 1, {}
        for mesh_dim, _ in reversed(self.DIMS):
            size = getattr(self, mesh_dim)
            if not isinstance(size, int) or size < 1:
                problem = f"found {size!r}, expected an integer of at least 1"
                raise MeshError("mesh", mesh_dim, problem, f"pass {mesh_dim}=1 to switch it off")
            places[mesh_dim], stride = [(mesh_dim, size, stride)], stride * size
        self.__dict__["_places"] = places  # also of "batch" and "loss", when first used
        if not 0 <= self.rank < self.world_size:
            problem = f"found {self.rank}, expected 0..{self.world_size - 1}: the mesh has {self.world_size} ranks"
            hint = "pass sizes whose product is the number of processes"
            raise MeshError("mesh", "rank", problem, hint)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        """Return the mesh itself: it is immutable, and its process groups belong to this process."""
        return self

    @property
    def world_size(self) -> int:
        """Return the number of ranks, the product of the sizes of all mesh dims."""
        return prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Return {mesh dim: size}: tp, pp and dp always, other mesh dims (cp) only if they have more than one rank."""
        names = dict.fromkeys((*ALWAYS, *(dim.name for dim in self.DIMS)))
        return {name: getattr(self, name) for name in names if self._is_in_use(name)}

    def _is_in_use(self, name: str) -> bool:
        return name in ALWAYS or getattr(self, name) > 1

    def named(self, mesh_dim: str) -> str:
        """Return the mesh dims for `mesh_dim`: "dp" for "batch", "dp+cp" (cp 1: "dp") for "loss", else itself."""
        if (divides := ROLES.get(mesh_dim)) is None:
            return mesh_dim
        names = [dim.name for dim in self.DIMS if dim.divides in divides]
        return "+".join(name for name in names if self._is_in_use(name))

    def _parts(self, mesh_dim: str) -> list[tuple[str, int, int]]:
        """Return (name, size, stride in global ranks) of each mesh dim that a name stands for ("loss": dp and cp)."""
        places = self.__dict__["_places"]
        if mesh_dim not in places:
            names = self.named(mesh_dim).split("+")
            if not set(names) <= places.keys():
                problem = f"found no such mesh dim, expected one of {(*self.sizes, *ROLES)}"
                raise MeshError("mesh", f"mesh_dim={mesh_dim!r}", problem, "pass one of these")
            places[mesh_dim] = [place for name in names for place in places[name]]
        return places[mesh_dim]

    def size(self, mesh_dim: str) -> int:
        """Return the size of a mesh dim, of "batch" (dp) or of "loss" (dp times cp); MeshError for an unknown name."""
        product = 1
        for _, size, _ in self._parts(mesh_dim):  # a loop: torch.compile traces no generator
            product *= size
        return product

    def coord(self, mesh_dim: str, rank: int | None = None) -> int:
        """Return the coordinate of a global rank along a mesh dim; `rank` None stands for this rank."""
        rank, found = self.rank if rank is None else rank, 0
        for _, size, stride in self._parts(mesh_dim):
            found = found * size + rank // stride % size
        return found

    def place(self, mesh_dim: str) -> tuple[int, int]:
        """Return (size n of a mesh dim, this rank's coordinate r on it)."""
        return self.size(mesh_dim), self.coord(mesh_dim)

    def at(self, **coords: int) -> int:
        """Return the global rank that has the given coordinates, and this rank's on all other mesh dims: `mesh.at(pp=0)`."""
        rank = self.rank
        for mesh_dim, coord in coords.items():
            for _, size, stride in reversed(self._parts(mesh_dim)):
                coord, mine = divmod(coord, size)
                rank += (mine - rank // stride % size) * stride
        return rank

    def ranks(self, **coords: int) -> list[int]:
        """Return all global ranks with the given coordinates, in order: `mesh.ranks(pp=0)` is the first stage."""
        wanted = list(coords.items())
        return [r for r in range(self.world_size) if all(self.coord(d, r) == c for d, c in wanted)]

    def seen_by(self, rank: int) -> "Mesh":
        """Return a copy of this mesh as the rank `rank` has it, with that rank's coordinates."""
        return replace(self, rank=rank)

    def peers(self, mesh_dim: str) -> list[int]:
        """Return the global ranks that differ from this rank at most in their coordinate along `mesh_dim`, in order."""
        return [self.at(**{mesh_dim: i}) for i in range(self.size(mesh_dim))]

    def group(self, mesh_dim: str) -> "ProcessGroup | Any | None":
        """Return this rank's process group along a mesh dim (a ShapeOnlyGroup in a dry run), or None when its size is 1."""
        if self.size(mesh_dim) == 1:
            return None
        if self.dry_run:
            return ShapeOnlyGroup(self.size(mesh_dim), self.coord(mesh_dim))
        if "_groups" not in self.__dict__:  # cached_property locks, and ranks may be threads
            self.__dict__["_groups"] = self._make_groups()
        return self.__dict__["_groups"][self.named(mesh_dim)]

    def group_of_hosts(self, mesh_dim: str) -> "ProcessGroup":
        """Return a gloo group (for CPU tensors) of the ranks along a mesh dim; these ranks create it on first use."""
        import torch.distributed as dist

        from slapo_zoo.parallel.compat import group_device

        known = self.__dict__.setdefault("_hosts", {})
        if mesh_dim not in known:
            world: Any = dist.group.WORLD
            waits = world._get_backend(group_device()).options._timeout
            own = {"backend": "gloo", "use_local_synchronization": True}
            known[mesh_dim] = dist.new_group(self.peers(mesh_dim), waits, **own)
        return known[mesh_dim]

    def _make_groups(self) -> "dict[str, ProcessGroup]":
        """Create all ranks' process groups; return {mesh dim: this rank's group}. A collective call of all ranks."""
        import torch.distributed as dist

        from slapo_zoo.parallel.compat import new_group

        if not dist.is_initialized():
            problem = f"{'*'.join(self.sizes)} = {self.world_size}, but there is no process group"
            hint = "start that many processes with torchrun, or run the ranks as threads with slapo_zoo.emulate"
            raise MeshError("mesh", self, problem, hint)
        mine, made = {}, {}
        names = [dim.name for dim in self.DIMS] + [self.named(role) for role in ROLES]
        for mesh_dim in dict.fromkeys(names):
            each = (self.seen_by(rank).peers(mesh_dim) for rank in range(self.world_size))
            for ranks in sorted(set(map(tuple, each))) if self.size(mesh_dim) > 1 else ():
                if ranks not in made:
                    made[ranks] = new_group(ranks)
                if self.rank in ranks:
                    mine[mesh_dim] = made[ranks]
        return mine
