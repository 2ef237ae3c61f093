"""The device mesh: dims tp (fastest), dp, pp; any rank can be inspected without a process group."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from slapo_zoo.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

MESH_DIMS = ("pp", "dp", "tp")  # slowest to fastest: tp peers are neighbours, as in Megatron-LM


class ShapeOnlyGroup(NamedTuple):
    """Stands for a process group in a dry run: collectives only change shapes.

    Args:
        size: of the group.
        rank: ours in it.
        note: called with kind and bytes of each collective (slapo_zoo.language.tape).
    """

    size: int
    rank: int
    note: "Callable[[str, int], None] | None" = None


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh dims and the rank that looks at them.

    rank = (pp_coord * dp + dp_coord) * tp + tp_coord

    Args:
        tp: ranks that shard each layer.
        pp: ranks that shard the layers into stages.
        dp: ranks that shard the batch.
        rank: the one that looks.
        dry_run: no process group; collectives only change shapes.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    rank: int = 0
    dry_run: bool = False

    def __post_init__(self):
        for mesh_dim in MESH_DIMS:
            if not isinstance(self.size(mesh_dim), int) or self.size(mesh_dim) < 1:
                problem = f"found {self.size(mesh_dim)!r}, expected an integer of at least 1"
                raise MeshError("mesh", mesh_dim, problem, f"pass {mesh_dim}=1 to switch it off")
        if not 0 <= self.rank < self.world_size:
            problem = f"found {self.rank}, expected 0..{self.world_size - 1}"
            raise MeshError("mesh", "rank", problem, "pass tp, pp and dp of all processes")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        """Itself: it never changes, and its process groups are this process's."""
        return self

    @property
    def world_size(self) -> int:
        """Number of processes, tp * pp * dp."""
        return self.tp * self.pp * self.dp

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of tp, pp and dp by name."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp}

    def size(self, mesh_dim: str) -> int:
        """Return the size of one mesh dim."""
        if mesh_dim not in MESH_DIMS:
            problem = f"expected one of {MESH_DIMS}"
            raise MeshError("mesh", f"mesh_dim={mesh_dim!r}", problem, "check its spelling")
        return getattr(self, mesh_dim)

    def coord(self, mesh_dim: str) -> int:
        """Return this rank's coordinate on one mesh dim."""
        strides = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}
        return self.rank // strides[mesh_dim] % self.size(mesh_dim)

    def place(self, mesh_dim: str) -> tuple[int, int]:
        """Size of one mesh dim and our coordinate on it, as placements ask for them."""
        return self.size(mesh_dim), self.coord(mesh_dim)

    def at(self, **coords: int) -> int:
        """The rank whose coordinates are ours, except those given: `mesh.at(pp=0)`."""
        tp, dp, pp = (coords.get(name, self.coord(name)) for name in ("tp", "dp", "pp"))
        return (pp * self.dp + dp) * self.tp + tp

    def peers(self, mesh_dim: str) -> list[int]:
        """The ranks that differ from us on `mesh_dim` only, in order."""
        return [self.at(**{mesh_dim: i}) for i in range(self.size(mesh_dim))]

    def group(self, mesh_dim: str) -> "ProcessGroup | Any | None":
        """The process group of one mesh dim, or None when its size is 1."""
        if self.size(mesh_dim) == 1:
            return None
        if self.dry_run:
            return ShapeOnlyGroup(self.size(mesh_dim), self.coord(mesh_dim))
        if "_groups" not in self.__dict__:  # cached_property locks, and ranks may be threads
            self.__dict__["_groups"] = self._make_groups()
        return self.__dict__["_groups"][mesh_dim]

    def group_of_hosts(self, mesh_dim: str) -> "ProcessGroup":
        """The ranks of `group` over gloo, which waits for no device; they together make it on first use."""
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
        """Created on first use by all ranks together (a collective call)."""
        import torch.distributed as dist

        from slapo_zoo.parallel.compat import new_group

        if not dist.is_initialized():
            problem = f"tp*pp*dp = {self.world_size}, but there is no process group"
            raise MeshError("mesh", self, problem, "start the processes with torchrun")
        mine = {}
        for mesh_dim in MESH_DIMS:
            others = {tuple(replace(self, rank=r).peers(mesh_dim)) for r in range(self.world_size)}
            for ranks in sorted(others) if self.size(mesh_dim) > 1 else ():
                group = new_group(ranks)
                if self.rank in ranks:
                    mine[mesh_dim] = group
        return mine
