"""replace: put another module, function or kernel in the place of a module, or of graph nodes."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_zoo.dispatch.kernel_registry import KERNELS, load_kernels
from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.language.graph.insert import arguments
from slapo_zoo.language.graph.match import Subgraph
from slapo_zoo.language.graph.rewrite import (
    check_hooks,
    insertion_point,
    replace_horizontal,
    replace_node,
    replace_vertical,
)
from slapo_zoo.language.graph.target import is_node, resolve


@primitive("replace")
@dataclass(frozen=True)
class Replace(Directive):
    """Replace a module by `new` under the same path, or replace nodes of its graph by calls of `new`.

    rewrite:  parent.name = old           -->  parent.name = new           (a live module)
              y = m(x)                    -->  y = kernel(m, x)            (a kernel's name)
              y = f(x)                    -->  y = new(x)                  (one node)
              t = f(a); y = g(t, b)       -->  y = new(a, b)               (one subgraph)
              q = f(x); k = g(x)          -->  r = new(x); q, k = r        (several subgraphs)
    note:     arguments go by name where the parameters of `new` are those of the pattern, else
              by position; modules that no graph calls any more are deleted
    errors:   unknown kernel; the root; a kernel that refuses the module; another number of
              arguments; inputs that are computed too late; hooks that would be lost

    Args:
        new: a module or function (which cannot be written as JSON), or the name of a registered kernel.
        subgraph: the result of `find`, or a regex over the modules that the graph calls; None: the module itself.
        name: the new child becomes `<name>_<k>`; by default the name of its class.
        options: (name, value) pairs, passed to the kernel as keyword arguments.
        carry: give the module `new` the parameters of the modules that it replaces, by name.
        concrete_args: constant keyword arguments of `new`.
        target_ops: another name of `subgraph`.
    """

    new: Any
    subgraph: Any = None
    name: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    options: tuple[tuple[str, Any], ...] = ()
    carry: bool = False
    concrete_args: Any = None
    target_ops: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_ops is not None:
            object.__setattr__(self, "subgraph", self.target_ops)
            object.__setattr__(self, "target_ops", None)

    def check(self, site: Site) -> None:
        if self.subgraph is None:
            self._check_module(site)
        elif isinstance(self.new, str):
            hint = "pass a function or a module; kernels replace whole modules, without subgraph="
            raise self.fail(site, f"no kernel {self.new!r} for nodes of a graph", hint)
        else:
            self._check_subgraphs(site, resolve(site, self, self.subgraph))

    def check_all(self, sites: list[Site]) -> None:
        super().check_all(sites)
        one = isinstance(self.new, nn.Module) and self.subgraph is None and len(sites) > 1
        nested = any(b.path.startswith(f"{a.path}.") for a in sites for b in sites)
        if one and (nested or self.new.state_dict()):
            problem = f"one {type(self.new).__name__} would stand for {len(sites)} modules, which lie in each other or would share weights"
            hint = "call replace_all(class, factory), or replace each module by a new one"
            raise self.fail(sites[0], problem, hint)

    def _check_module(self, site: Site) -> None:
        if callable(self.new):
            if not isinstance(self.new, nn.Module):
                hint = "pass an nn.Module, or subgraph= (of find()) that the function replaces"
                raise self.fail(site, f"{self.new!r} is a function, not a module", hint)
            if not site.path:
                hint = "create a schedule of the new model instead"
                raise self.fail(site, "the root of the model cannot be replaced", hint)
            return
        if self.new not in KERNELS and self.new not in load_kernels():
            hint = f"choose one of the registered: {sorted(KERNELS)}"
            raise self.fail(site, f"no kernel {self.new!r}", hint)
        if reason := KERNELS[self.new].refuses(site.module):
            raise self.fail(site, reason, "select only modules that the kernel serves")

    def _check_subgraphs(self, site: Site, found: list[Subgraph]) -> None:
        for subgraph in found:
            check_hooks(subgraph.nodes, subgraph.module, subgraph.path)
        if not self._one_node(found):
            insertion_point(found[0])
            constants = self.concrete_args or {}
            arguments(self.new, found[0].inputs, found[0].path, constants)

    def _one_node(self, found: list[Subgraph]) -> bool:
        """Return True if `self.subgraph`, a (path, node) or regex, has one match in `found`; `new` gets its inputs."""
        named = is_node(self.subgraph) or isinstance(self.subgraph, str)
        return named and len(found) == 1

    def apply(self, site: Site) -> None:
        if self.subgraph is not None:
            self._rewrite(resolve(site, self, self.subgraph))
        elif not isinstance(self.new, nn.Module):
            KERNELS[self.new].install(site, **dict(self.options))
            return
        else:
            self.new.train(site.module.training)
            site.state.forget(site.path, self.new)
            site.state.put(site.path, self.new)
        site.state.index()

    def _rewrite(self, found: list[Subgraph]) -> None:
        new, constants = self.new, self.concrete_args or {}
        if self._one_node(found):
            owner, node = found[0].module, found[0].nodes[0]
            replace_node(owner, node, new, found[0].path, self.name, constants)
        elif len(found) == 1:
            replace_vertical(found[0], new, self.name, self.carry, constants)
        else:
            replace_horizontal(found, new, self.name, self.carry, constants)
