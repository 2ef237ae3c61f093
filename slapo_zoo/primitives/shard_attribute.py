"""shard_attribute: a size that the forward reads becomes this rank's size."""

from dataclasses import dataclass

from slapo_zoo.directive import Directive, Site, primitive
from slapo_zoo.placement import Placement


@primitive("shard_attribute")
@dataclass(frozen=True)
class ShardAttribute(Directive):
    """Divide an integer attribute as `shard` divides an axis of that size.

    rewrite:  attention.num_heads = 12  -->  attention.num_heads = 6    (n = 2)
    errors:   no such integer attribute; fewer units than ranks
    why:      GPT-2, GPT-Neo, OPT and T5 reshape by such attributes; OPT is silently wrong without

    Args:
        attribute: its name.
        unit: length of a run that stays whole; `split_size` counts columns, so its unit is head_dim.
        mesh_dim: the mesh dim.
    """

    attribute: str
    unit: int = 1
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        size = getattr(site.module, self.attribute, None)
        if not isinstance(size, int):
            problem = f"found {size!r}, expected an integer attribute {self.attribute!r}"
            raise self.fail(site, problem, "name an attribute that the module's __init__ sets")
        n = site.mesh.size(self.mesh_dim)
        if problem := Placement(0, unit=self.unit).problem(size, n):
            legal = [m for m in range(1, n) if not Placement(0, unit=self.unit).problem(size, m)]
            raise self.fail(site, problem, f"legal sizes of {self.mesh_dim}: {legal}")

    def apply(self, site: Site) -> None:
        n, r = site.mesh.size(self.mesh_dim), site.mesh.coord(self.mesh_dim)
        size = getattr(site.module, self.attribute)
        local = Placement(0, unit=self.unit).local_size(size, n, r)
        setattr(site.module, self.attribute, local)
