"""shard_argument: pass a module only this rank's heads of an argument that was computed for all heads."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.placement import Placement


@primitive("shard_argument")
@dataclass(frozen=True)
class ShardArgument(Directive):
    """Slice a tensor argument, which the module gets by keyword, along one axis; each rank keeps its heads.

    rewrite:  attention(x, alibi=a [B * H, 1, T])  -->  attention(x, alibi=a_r [B * H/n, 1, T])
              a holds `size` heads of each row, row by row, and a_r this rank's heads of each; the backward
              all-reduces da; if `axis` > 0, a may also be None or have one head for all: it stays unchanged
    why:      BLOOM computes the biases of all heads once, before its blocks; Falcon adds them to its mask
    errors:   fewer heads than ranks; a call in which the argument is no tensor, or its axis has another length

    Args:
        argument: name of the keyword argument.
        size: number of heads on all ranks together.
        axis: axis of the tensor that is sliced.
        mesh_dim: name of the mesh dim that the heads are sharded over.
    """

    argument: str
    size: int
    axis: int = 0
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        n = site.mesh.size(self.mesh_dim)
        if self.size < n:
            dim, hint = self.mesh_dim, f"choose among legal sizes of {self.mesh_dim}: 1..{self.size}"  # fmt: skip
            problem = f"{self.size} heads cannot be sharded over {dim}={n}: each rank needs one"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        n, r = site.mesh.size(self.mesh_dim), site.mesh.coord(self.mesh_dim)
        if n == 1:
            return
        (run,) = Placement(0).runs(self.size, n, r)

        def mine(_module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            x = kwargs.get(self.argument)
            if self.axis and (x is None or (isinstance(x, Tensor) and x.shape[self.axis] == 1)):
                return args, kwargs
            if not isinstance(x, Tensor) or x.shape[self.axis] % self.size:
                found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                problem = f"the keyword argument {self.argument!r} is {found}: expected a tensor that holds on axis {self.axis} the {self.size} heads of all ranks"
                hint = f"pass {self.argument}= unsharded: a multiple of {self.size} (heads, or rows * heads) on axis {self.axis}"
                raise self.fail(site, problem, hint)
            x = collectives.reduce_backward(x, site.group(self)) if x.requires_grad else x
            rows = x.unflatten(self.axis, (-1, self.size))
            part = rows.narrow(self.axis + 1, run.start, run.stop - run.start)
            return args, kwargs | {self.argument: part.flatten(self.axis, self.axis + 1)}

        site.module.register_forward_pre_hook(mine, with_kwargs=True)
