"""List the registered primitives, and register those of third parties."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import PRIMITIVES, Directive, Site, primitive


def list_primitives(name_only: bool = True) -> list[str] | dict[str, type[Directive]]:
    """Return the sorted names of all schedule primitives; with `name_only=False` a dict from name to class."""
    return sorted(PRIMITIVES) if name_only else dict(sorted(PRIMITIVES.items()))


def register_primitive() -> Callable[[type], type]:
    """Return a decorator that registers a class as a primitive, used as `sch[pattern].<name>(...)`.

    The class is a Directive with a class attribute `name`, or has two static methods: `name()`, and `apply(sch,
    *args, **kwargs)`, where `sch` has `mod`, `path`, `name`, `parent`, `rank`, `world_size`, and the other
    primitives as methods.
    """

    def register(cls: type) -> type:
        if not inspect.isclass(cls):
            problem = f"found {cls!r}, expected a class"
            hint = "write @register_primitive() above a class"
            raise ScheduleError("register_primitive", "", problem, hint)
        name, apply = getattr(cls, "name", None), getattr(cls, "apply", None)
        if issubclass(cls, Directive) and isinstance(name, str):
            return primitive(name)(cls)
        if not callable(name) or not callable(apply):
            problem = "found no static methods name() and apply(sch, ...)"
            hint = "define both (help(slapo_zoo.register_primitive) shows them)"
            raise ScheduleError("register_primitive", cls.__name__, problem, hint)
        primitive(str(name()))(_adapt(cls))
        return cls

    return register


@dataclass(frozen=True)
class SiteView:
    """One module of a schedule, as the `apply` of a user's own primitive gets it; other primitives are its methods."""

    site: Site

    @property
    def mod(self) -> nn.Module:
        """Return the module that is at the path now, i.e. the new one after a primitive has replaced it."""
        return self.site.state.modules[self.site.path]

    @property
    def path(self) -> str:
        """Return the path of the module in the model."""
        return self.site.path

    @property
    def name(self) -> str:
        """Return the last segment of the module's path."""
        return self.site.path.rpartition(".")[2]

    @property
    def parent(self) -> "SiteView | None":
        """Return the view of the parent module; None for the root."""
        if not self.site.path:
            return None
        path, state = self.site.path.rpartition(".")[0], self.site.state
        return SiteView(Site(path, state.modules[path], state))

    @property
    def world_size(self) -> int:
        """Return the number of tp ranks."""
        return self.site.mesh.tp

    @property
    def rank(self) -> int:
        """Return the tp coordinate of this rank."""
        return self.site.mesh.coord("tp")

    def __getattr__(self, name: str) -> Callable[..., "SiteView"]:
        if name not in PRIMITIVES:
            known = f"choose one of the registered: {sorted(PRIMITIVES)}"
            raise AttributeError(f"the argument sch of apply() has no primitive {name!r}: {known}")

        def use(*args: Any, **kwargs: Any) -> "SiteView":
            directive = PRIMITIVES[name].called(self.site.path, args, kwargs)
            site = Site(self.site.path, self.mod, self.site.state)
            directive.check(site)
            directive.apply(site)
            return self

        return use


def _adapt(cls: Any) -> type[Directive]:
    """Return a Directive class that calls the static `apply` of `cls`, a class that is no Directive itself."""

    class Adapted(Directive):
        __doc__ = cls.__doc__

        def __init__(self, *args: Any, **kwargs: Any):
            self.given = {**{f"args_{i}": v for i, v in enumerate(args)}, **kwargs}
            self.args, self.kwargs = args, kwargs

        def arguments(self) -> dict[str, Any]:
            return self.given

        def local(self) -> str:
            return f"{self.name} is a primitive that this program registered, and others lack it"

        def apply(self, site: Site) -> None:
            cls.apply(SiteView(site), *self.args, **self.kwargs)

    parameters = list(inspect.signature(cls.apply).parameters.values())[1:]
    Adapted.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return Adapted
