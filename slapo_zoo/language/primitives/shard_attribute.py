"""shard_attribute: give a module's attribute such as `num_heads` the value of this rank's shard."""

import copy
from dataclasses import dataclass
from typing import Any

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.parallel.placement import Placement

OF_CONFIG = "config."


@primitive("shard_attribute")
@dataclass(frozen=True)
class ShardAttribute(Directive):
    """Set an integer attribute that counts heads or columns to this rank's number of them.

    rewrite:  attention.num_heads = 12  -->  attention.num_heads = 6    (n = 2)
    errors:   no such integer attribute; fewer units (indices that stay together) than ranks
    why:      GPT-2, GPT-Neo, OPT and T5 reshape by such attributes; without the
              directive OPT computes wrong numbers and raises no error

    Args:
        attribute: name of the attribute; for "config.num_attention_heads" the module gets a copy of its
            config (Phi-3 slices by it), so directives that change the model's config come before.
        unit: what stays on one rank: 1 head if the attribute counts heads, head_dim columns if it counts columns.
        together: number of query heads per KV head: they stay on one rank where every rank can get a KV head.
        replicate: True if several ranks hold the same head when there are fewer heads than ranks; each counts 1 then.
        keep: for `num_key_value_groups` (query heads per KV head) the number of KV heads: with n ranks the attribute
            is sharded over n // keep ranks, so it shrinks only if there are more ranks than KV heads.
        mesh_dim: name of the mesh dim that the counted units are sharded over.
    """

    attribute: str
    unit: int = 1
    together: int = 1
    replicate: bool = False
    keep: int = 1
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        size = getattr(self._holder(site), self._leaf, None)
        if not isinstance(size, int):
            problem = f"found {size!r}, expected an integer attribute {self.attribute!r}"
            raise self.fail(site, problem, "name an int of the module, or of its config: config.X")
        if min(self.unit, self.together, self.keep) < 1:
            problem = f"found unit={self.unit}, together={self.together}, keep={self.keep}"
            raise self.fail(site, problem, "pass counts of at least 1")
        if problem := self._placement.problem(size, self._ranks(site)):
            n = self._ranks(site)
            legal = [m for m in range(1, n) if not self._placement.problem(size, m)]
            raise self.fail(site, problem, f"choose among legal sizes of {self.mesh_dim}: {legal}")

    def apply(self, site: Site) -> None:
        applied = site.state.applied.setdefault(site.path, set())
        if self.attribute in applied:
            return  # shard() has set the groups of a GroupNorm or convolution
        applied.add(self.attribute)
        holder, n = self._holder(site), self._ranks(site)
        size, r = getattr(holder, self._leaf), site.mesh.coord(self.mesh_dim) % n
        local = self._placement.local_size(size, n, r)
        if holder is not site.module and local != size:
            module: Any = site.module
            module.config = holder = copy.copy(holder)
        setattr(holder, self._leaf, local)

    @property
    def _leaf(self) -> str:
        return self.attribute.removeprefix(OF_CONFIG)

    def _holder(self, site: Site) -> Any:
        """Return the object that has the attribute: the module or its config; None if the module has no config."""
        of_config = self.attribute.startswith(OF_CONFIG)
        return getattr(site.module, "config", None) if of_config else site.module

    @property
    def _placement(self) -> Placement:
        return Placement(0, unit=self.unit, together=self.together, replicate=self.replicate)

    def _ranks(self, site: Site) -> int:
        n = site.mesh.size(self.mesh_dim)
        return n if self.keep == 1 else max(1, n // self.keep)
