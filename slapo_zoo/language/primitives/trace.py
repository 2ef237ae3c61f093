"""trace: replace a module by its graph, at the same place in the module tree."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from slapo_zoo.language.directive import Directive, Site, primitive, subtree
from slapo_zoo.language.graph.examples import capture
from slapo_zoo.language.graph.trace import install, trace_module, trace_tree
from slapo_zoo.parallel.compat import ranks_are_threads

# Traced modules that check() made and apply() will install.
_traced: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


class Traces(Directive):
    """Base class of directives whose `check` traces modules, and whose `apply` puts the traced modules into the model."""

    example_inputs: Any

    def trace(self, site: Site) -> dict[str, Any]:
        """Trace modules that a subclass selects; return {path below `site`'s module, '' for itself: traced module}."""
        raise NotImplementedError(f"{type(self).__name__} must define trace(site)")

    def local(self) -> str:
        return "example_inputs holds tensors, not JSON" if self.example_inputs is not None else ""

    def check(self, site: Site) -> None:
        inner = (p for p in subtree(site.path, list(site.state.modules)) if p != site.path)
        waits = [p for p in inner if {"fwd_pre", "fwd_post"} & site.state.applied.get(p, set())]
        if waits and ranks_are_threads():
            problem = f"{waits[0]!r} has a collective, and ranks that are threads trace one after the other"
            hint = "call trace() before sync(), or run ranks as processes (run_local, torchrun)"
            raise self.fail(site, problem, hint)
        _traced[site.module] = self.trace(site)

    def apply(self, site: Site) -> None:
        traced = _traced.pop(site.module)
        site.state.put(site.path, top := traced.pop(""))
        install(top, traced)
        site.state.index()

    def example(self, site: Site) -> tuple[tuple, dict[str, Any]]:
        """Return the traced call's (args, kwargs): `example_inputs`, or those in a model call on a tiny batch."""
        given = self.example_inputs
        if given is None:
            return capture(site.state.model, site.path)
        if isinstance(given, dict):
            return (), given
        return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


@primitive("trace")
@dataclass(frozen=True)
class Trace(Traces):
    """Record the forward of a module as a graph; children, parameters and their names stay.

    rewrite:  y = f(x)  -->  y = graph(x), a GraphModule with the same children
    note:     sizes stay symbolic; a branch that the forward took (an argument that was None, a
              size that was 1) is checked in every call. Dropout follows `train()` and `eval()`.
              With predicates or example inputs the schedule cannot be written as JSON
    errors:   the forward branches on the elements of a tensor, stores a result in the module, or
              calls an autograd function: the error says what to make a leaf

    Args:
        leaves: modules that stay one node: paths below the module, class names, or predicates
            (module, path) --> bool. Modules of torch.nn (not Sequential), Conv1D and `core_attn` always stay.
        flatten: True records one graph for the module and all below it; False a graph in which each child is a node.
        example_inputs: a tuple of arguments, or a dict of them by name; None captures
            the module's arguments in a call of the `transformers` model on a tiny batch.
        recursive: without `flatten`, True also gives every called module below a graph of its own.
    """

    leaves: Any = ()
    flatten: bool = False
    example_inputs: Any = None
    recursive: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        leaves = (self.leaves,) if isinstance(self.leaves, str) else tuple(self.leaves)
        object.__setattr__(self, "leaves", leaves)  # JSON has lists only

    def local(self) -> str:
        live = [leaf for leaf in self.leaves if not isinstance(leaf, str)]
        return super().local() or (f"leaves holds {live}, expected names only" if live else "")

    def trace(self, site: Site) -> dict[str, Any]:
        args, kwargs = self.example(site)
        if self.flatten or not self.recursive:
            path, leaves = site.path, self.leaves
            return {"": trace_module(site.module, args, kwargs, leaves, self.flatten, path)}
        return trace_tree(site.module, args, kwargs, self.leaves, site.path)
