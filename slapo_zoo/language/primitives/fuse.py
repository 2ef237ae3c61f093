"""fuse: turn nodes of a graph into one compiled module."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.language.graph.group import GroupModule, group
from slapo_zoo.language.graph.insert import called
from slapo_zoo.language.graph.rewrite import insertion_point
from slapo_zoo.language.graph.target import resolve

COMPILERS = ("inductor", "TorchScript", None)
logger = logging.getLogger(__name__)


@primitive("fuse")
@dataclass(frozen=True)
class Fuse(Directive):
    """Move the matched nodes into one child module and compile it.

    rewrite:  t = f(a); y = g(t, b)  -->  y = self.FusedModule_0(a, b)
    note:     the modules that the nodes call keep their paths
    errors:   an unknown compiler; nothing matches

    Args:
        subgraph: the result of `find` or a pattern function (a schedule with either cannot be written to a
            file), or a regex over the modules that the graph calls.
        compiler: "inductor" (torch.compile, at the first call), "TorchScript" (inductor where torch.jit.script cannot be
            used, which is logged), or None: grouping only.
        name: the child becomes `<name>_<k>`.
    """

    subgraph: Any = None
    compiler: str | None = "inductor"
    name: str = "FusedModule"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second = self.subgraph, self.compiler
        if isinstance(first, str) and first in COMPILERS and second not in COMPILERS:
            object.__setattr__(self, "subgraph", second)  # fuse(compiler, subgraph): Slapo's order
            object.__setattr__(self, "compiler", first)

    def check(self, site: Site) -> None:
        if self.compiler not in COMPILERS:
            problem = f"found compiler {self.compiler!r}, expected one of {COMPILERS}"
            hint = "choose one of these; a kernel of your own takes nodes by replace(function, subgraph)"
            raise self.fail(site, problem, hint)
        if self.subgraph is None:
            hint = "pass subgraph=, e.g. what sch[path].find(pattern) returned"
            raise self.fail(site, "found no argument subgraph=", hint)
        for subgraph in resolve(site, self, self.subgraph):
            insertion_point(subgraph)

    def apply(self, site: Site) -> None:
        for subgraph in resolve(site, self, self.subgraph):
            _, child = group(subgraph, self.name)
            if self.compiler == "TorchScript":
                _script(child)
            elif self.compiler == "inductor":
                child.compile(backend="inductor")
        site.state.index()


def _script(child: GroupModule) -> None:
    """Compile `child`, a module of grouped nodes, with torch.jit.script, or if that fails with inductor (logged)."""
    reason = "it calls modules of the model"
    if not any(called(child, n) or n.op == "get_attr" for n in child.graph.nodes):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and accepted here
                scripted = torch.jit.script(fx.GraphModule(torch.nn.Module(), child.graph))
            child.__dict__["forward"] = scripted.forward
            return
        except Exception as error:
            reason = f"torch.jit.script fails: {error}"
    logger.warning("fuse(compiler='TorchScript') uses inductor: %s", reason)
    child.compile(backend="inductor")
