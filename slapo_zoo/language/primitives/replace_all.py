"""replace_all: replace every module of one class below a module."""

from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from slapo_zoo.dispatch.kernel_registry import KERNELS
from slapo_zoo.language.directive import Directive, Site, primitive, subtree

# New modules that check() made and apply() will put into the model.
_made: WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()


@primitive("replace_all")
@dataclass(frozen=True)
class ReplaceAll(Directive):
    """Replace all modules of a class below the selected module by what a factory returns for each, or by a kernel.

    rewrite:  for each m of the class:  parent.name = m  -->  parent.name = factory(path, m)
    note:     the factory gets the original modules; modules inside a replaced one are not replaced again
    errors:   no such module; a factory that returns no module; a module that the kernel does not support

    Args:
        target_mod_type: a class (subclasses are replaced too), or its name. Only names can be saved as JSON.
        make_mod_fn: function (path, module, **options) --> module, or a kernel's name. Only names can be saved as JSON.
        options: (name, value) pairs for the factory or kernel; a call may pass them as keywords.
    """

    target_mod_type: Any
    make_mod_fn: Any
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> "ReplaceAll":
        """Construct the directive from its three fields; any other keyword argument becomes a pair in `options`."""
        own = {f.name for f in fields(cls)}
        options = tuple((k, v) for k, v in kwargs.items() if k not in own)
        known = {k: v for k, v in kwargs.items() if k in own}
        return cls(*args, **known, **({"options": options} if options else {}))

    def check(self, site: Site) -> None:
        found = self._found(site)
        if not found:
            classes = sorted({type(m).__name__ for m in site.module.modules()})
            problem = f"found no module of type {self.target_mod_type!r} below this one"
            raise self.fail(site, problem, f"choose one of {classes}")
        if callable(self.make_mod_fn):
            _made[site.module] = self._make(site)  # one that fails leaves the model as it is
            return
        if self.make_mod_fn not in KERNELS:
            hint = f"choose one of the registered: {sorted(KERNELS)}"
            raise self.fail(site, f"no kernel {self.make_mod_fn!r}", hint)
        for path, module in found:
            if reason := KERNELS[self.make_mod_fn].refuses(module):
                hint = "select the modules that the kernel serves, and call replace() on them"
                raise self.fail(Site(path, module, site.state), reason, hint)

    def _found(self, site: Site) -> list[tuple[str, nn.Module]]:
        def matches(module: nn.Module) -> bool:
            if isinstance(self.target_mod_type, type):
                return isinstance(module, self.target_mod_type)
            return type(module).__name__ == self.target_mod_type

        paths = [p for p in subtree(site.path, list(site.state.modules)) if p != site.path]
        return [(p, m) for p in paths if matches(m := site.state.modules[p])]

    def apply(self, site: Site) -> None:
        if not callable(self.make_mod_fn):
            for path, module in self._found(site):
                at = Site(path, module, site.state)
                KERNELS[self.make_mod_fn].install(at, **dict(self.options))
        else:
            for path, new in _made.pop(site.module).items():
                new.train(site.state.modules[path].training)
                site.state.forget(path, new)
                site.state.put(path, new)
        site.state.index()

    def _make(self, site: Site) -> dict[str, nn.Module]:
        """Call the factory for each module of the class below the module of `site`; return {path: new module}."""
        made: dict[str, nn.Module] = {}
        for path, module in self._found(site):
            if any(path.startswith(f"{outer}.") for outer in made):
                continue  # inside a module that is replaced
            new = self.make_mod_fn(path, module, **dict(self.options))
            if not isinstance(new, nn.Module):
                raise self.fail(site, f"make_mod_fn returned {new!r} for {path}", "return a module")
            made[path] = new
        return made
