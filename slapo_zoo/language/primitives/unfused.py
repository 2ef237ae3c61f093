"""unfused: make a module take the code path that calls its children instead of one fused kernel."""

from dataclasses import dataclass
from functools import wraps
from typing import Any

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.parallel.replaced import replaced


@primitive("unfused")
@dataclass(frozen=True)
class Unfused(Directive):
    """Run the forward of a module with `training=False`; its children stay in their own mode.

    rewrite:  y = fused(x, weights of the children) if training else f(x)  -->  y = f(x)
    why:      Mamba's training path hands all weights to one kernel where mamba_ssm is installed;
              the all-reduce in its middle would be silently left out
    errors:   the module has a dropout of its own, which the flag would switch off

    Args:
        mesh_dim: the fused path stays when this mesh dim has size 1.
    """

    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        if getattr(site.module, "p", 0.0):
            hint = "select the module whose forward takes a fused kernel if its `training` is True"
            problem = "the module applies a dropout itself, which training=False would switch off"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        if site.mesh.size(self.mesh_dim) == 1:
            return
        module: Any = site.module
        forward = module.forward

        @wraps(forward)
        def unfused(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, "training", False):
                return forward(*args, **kwargs)

        module.forward = unfused
