"""unfused: a module takes the path that calls its children, not one fused kernel for all of them."""

from dataclasses import dataclass
from functools import wraps
from typing import Any

from slapo_zoo.language.directive import Directive, Site, primitive


@primitive("unfused")
@dataclass(frozen=True)
class Unfused(Directive):
    """Run the forward of a module as if it were not training; its children stay as they are.

    rewrite:  y = fused(x, weights of the children) if training else f(x)  -->  y = f(x)
    why:      Mamba's training path hands all weights to one kernel where mamba_ssm is installed;
              the sum over ranks in its middle would be left out in silence
    errors:   the module drops out by itself, so the flag means more than a choice of kernels

    Args:
        mesh_dim: where this is 1, the fused path stays.
    """

    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        if getattr(site.module, "p", 0.0):
            raise self.fail(site, "found a dropout", "name the module that chooses a kernel")

    def apply(self, site: Site) -> None:
        if site.mesh.size(self.mesh_dim) == 1:
            return
        module: Any = site.module
        forward = module.forward

        @wraps(forward)
        def unfused(*args: Any, **kwargs: Any) -> Any:
            before, module.training = module.training, False
            try:
                return forward(*args, **kwargs)
            finally:
                module.training = before

        module.forward = unfused
