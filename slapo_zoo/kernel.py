"""Kernel registry: what `replace(name)` may put into a module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_zoo.errors import ScheduleError


@dataclass(frozen=True)
class Kernel:
    """A fast path for a module.

    Args:
        name: as in `replace(name)`.
        install: puts it into the module of a site; adds no key to the state dict.
        refuses: why it cannot serve a module, or the empty string.
    """

    name: str
    install: Callable[..., None]
    refuses: Callable[[nn.Module], str]


KERNELS: dict[str, Kernel] = {}


def register_kernel(
    name: str, refuses: Callable[[nn.Module], str] = lambda module: ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated `install(site, **options)` under `name`."""

    def register(install: Callable[..., Any]) -> Callable[..., Any]:
        if name in KERNELS:
            raise ScheduleError("kernel", name, "the name is already registered", "choose another")
        KERNELS[name] = Kernel(name, install, refuses)
        return install

    return register
