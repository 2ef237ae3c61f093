"""trace_until: trace the modules on the way down to some paths, and no deeper."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_zoo.language.directive import Site, join, primitive
from slapo_zoo.language.graph.trace import trace_tree
from slapo_zoo.language.primitives.trace import Traces
from slapo_zoo.parallel.paths import nearest


@primitive("trace_until")
@dataclass(frozen=True)
class TraceUntil(Traces):
    """Trace a module and its descendants above `paths`; the modules at `paths` stay as they are.

    rewrite:  f(x) = ... g(h(x)) ...  -->  graph with `g` and `h` as nodes  (paths = g, h)
    errors:   a path that is no module below this one, and the errors of `trace`

    Args:
        paths: paths of modules below this one, in full or relative to it.
        example_inputs: a tuple of arguments, or a dict of them by name; None captures the arguments
            in a call of the `transformers` model on a tiny batch.
    """

    paths: Any
    example_inputs: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        object.__setattr__(self, "paths", paths)

    def trace(self, site: Site) -> dict[str, Any]:
        targets = [self._below(site, path) for path in self.paths]
        parts = [target.split(".") for target in targets]
        way = {".".join(p[:i]) for p in parts for i in range(len(p))}

        def is_leaf(_module: nn.Module, path: str) -> bool:
            return path not in way

        args, kwargs = self.example(site)
        return trace_tree(site.module, args, kwargs, (is_leaf,), site.path)

    def _below(self, site: Site, path: str) -> str:
        """Return `path` relative to that of `site`, the traced module; ScheduleError if it has no such submodule."""
        modules = site.state.modules
        if path and join(site.path, path) in modules:
            return path
        if path in modules and path.startswith(site.path + "."):
            return path.removeprefix(site.path + ".")
        near = nearest(path, modules)
        raise self.fail(site, f"found no module {path!r} below this one", f"nearest paths: {near}")
