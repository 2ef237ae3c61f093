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


@dataclass(frozen=True)
class FusedKernel:
    """A fast path for a subgraph.

    Args:
        name: as in `fuse(compiler="kernel", name=...)` and `replace(name, subgraph)`.
        pattern: what it computes; its argument names are those of the function.
        function: the kernel.
    """

    name: str
    pattern: Callable[..., Any]
    function: Callable[..., Any]


FUSED_KERNELS: dict[str, FusedKernel] = {}


def register_fused_kernel(
    name: str, pattern: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the kernel for all subgraphs that match `pattern`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in FUSED_KERNELS:
            raise ScheduleError("kernel", name, "the name is already registered", "choose another")
        FUSED_KERNELS[name] = FusedKernel(name, pattern, function)
        return function

    return register
