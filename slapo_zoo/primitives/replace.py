"""replace: another module, or a registered kernel, takes a module's place."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_zoo.directive import Directive, Site, primitive
from slapo_zoo.kernel import KERNELS


@primitive("replace")
@dataclass(frozen=True)
class Replace(Directive):
    """Put `new` where the module is, under the same path.

    rewrite:  parent.name = old  -->  parent.name = new          (a live module: local only)
              m.forward(x)       -->  KERNELS[new].install(site)  (a registered kernel name)
    errors:   unknown kernel; the root; a kernel that refuses the module, with its reason

    Args:
        new: a module, or the name of a registered kernel.
        options: keyword arguments of the kernel.
    """

    new: Any
    options: tuple[tuple[str, Any], ...] = ()

    def check(self, site: Site) -> None:
        if isinstance(self.new, nn.Module):
            if not site.path:
                raise self.fail(
                    site, "the root cannot be replaced", "build a schedule on the new one"
                )
            return
        if self.new not in KERNELS:
            raise self.fail(site, f"no kernel {self.new!r}", f"registered: {sorted(KERNELS)}")
        if reason := KERNELS[self.new].refuses(site.module):
            raise self.fail(site, reason, "select only modules that the kernel serves")

    def apply(self, site: Site) -> None:
        if not isinstance(self.new, nn.Module):
            KERNELS[self.new].install(site, **dict(self.options))
            return
        parent, _, name = site.path.rpartition(".")
        self.new.train(site.module.training)
        setattr(site.state.modules[parent], name, self.new)
        site.state.index()
