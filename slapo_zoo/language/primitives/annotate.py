"""annotate: set an attribute on a parameter."""

from dataclasses import dataclass
from typing import Any

from slapo_zoo.language.directive import Directive, Site, primitive


@primitive("annotate")
@dataclass(frozen=True)
class Annotate(Directive):
    """Set an attribute of a parameter; the attribute is kept when the parameter is sharded later.

    rewrite:  m.weight  -->  m.weight with m.weight.<key> == value
    errors:   no such parameter; a key that is an attribute of every tensor, such as `grad`

    Args:
        param_name: name of a parameter of the module.
        key: name of the attribute.
        value: value of the attribute.
    """

    param_name: str
    key: str
    value: Any

    def check(self, site: Site) -> None:
        parameter = site.module._parameters.get(self.param_name)
        if parameter is None:
            has = ", ".join(site.module._parameters) or "none"
            problem = f"the module has no parameter {self.param_name!r}"
            raise self.fail(site, problem, f"choose one of: {has}")
        if self.key not in parameter.__dict__ and hasattr(parameter, self.key):
            hint = "choose another key for the annotation"
            raise self.fail(site, f"every torch tensor already has an attribute {self.key!r}", hint)

    def apply(self, site: Site) -> None:
        setattr(site.module._parameters[self.param_name], self.key, self.value)
