"""sum_gradient: all-reduce the gradient of an unsharded parameter over tp."""

from dataclasses import dataclass

from slapo_zoo.language.directive import Directive, Site, primitive


@primitive("sum_gradient")
@dataclass(frozen=True)
class SumGradient(Directive):
    """All-reduce the gradient of a parameter over tp after each backward.

    rewrite:  dw  -->  sum of dw over the tp ranks
    why:      a parameter that every rank holds unsharded, but uses on its own heads only (the q and k
              norms of Qwen3), or on its own tokens only (norms under sequence parallelism)
    errors:   no such parameter; the parameter is sharded, so its gradient is complete

    Args:
        param_name: name of a parameter of the module.
        sequence: sum only in steps in which tokens are sharded over tp.
    """

    param_name: str
    sequence: bool = False

    def check(self, site: Site) -> None:
        if self.param_name not in site.module._parameters:
            has = ", ".join(site.module._parameters) or "none"
            raise self.fail(site, f"no parameter {self.param_name!r}", f"choose one of: {has}")
        if placed := site.placed(self.param_name):
            problem = f"the parameter is sharded by {placed.directive}"
            hint = "leave the directive out: each rank has the complete gradient of its shard"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        state = site.state
        names = state.sequence_gradients if self.sequence else state.partial_gradients
        if site.mesh.tp > 1:
            names.add(site.name(self.param_name))
