"""Kernel registry: what `replace(name)` may put into a module, and which path runs on a device."""

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.dispatch.fast_enough import decide
from slapo_zoo.dispatch.tables import UNMEASURED, changes, table_of
from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel.once import once

NAMESPACE = "slapo_zoo"  # of the operators, in torch.ops
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs on the CPU, slowly
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # sums are fp32: too coarse for fp64


@dataclass(frozen=True)
class Kernel:
    """A fast path for a module.

    Args:
        name: as in `replace(name)`.
        install: puts it into the module of a site; adds no key to the state dict.
        refuses: why it cannot serve a module, or the empty string.
        serves: class names of modules, and the forward that each gets.
        entry: the public function.
        reference: the slow truth, in plain torch operations.
        inputs: test shape --> keyword arguments of both.
        shapes: that it is tested on.
        paths: what runs on a type of device where nothing else was measured to be faster.
        sites: paths of a model's modules that it is for; None takes all whose class it serves.
        runs_inside: it runs all modules inside the one that it serves, and so their kernels.
        innermost: every kernel runs the modules that it serves, as modules.
        limits: why its Triton path cannot serve a tensor of this dtype and last axis, or "".
    """

    name: str
    install: Callable[..., None]
    refuses: Callable[[nn.Module], str]
    serves: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    entry: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    inputs: Callable[..., dict[str, Any]] | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    paths: Mapping[str, str] = field(default_factory=dict)
    sites: Callable[[Any], list[str]] | None = None
    runs_inside: bool = False
    innermost: bool = False
    limits: Callable[[Tensor], str] = lambda x: ""

    def falls_back(self, dtype: torch.dtype, size: int, device: str) -> str:
        """Why it runs as torch operations on a GPU, whatever was measured, or the empty string."""
        if device == "cpu":
            return ""
        if not HAS_TRITON:
            return "Triton is not installed"
        if dtype not in TRITON_DTYPES:
            return f"{str(dtype)[6:]} has no Triton kernel"
        return self.limits(torch.empty(1, size, dtype=dtype, device="meta"))

    def runs(self, device: str) -> tuple[str, str]:
        """The path on a device ("cpu", or the name of a GPU), and why."""
        if device == "cpu":
            return self.paths.get("cpu", "torch"), "the best of what runs on a CPU"
        if not any(key.startswith(f"{self.name}:") for key in table_of(device).dispatch):
            return "torch", f"{UNMEASURED} on {device}"
        return "triton", "where it was measured not to be slower"


KERNELS: dict[str, Kernel] = {}


def register_kernel(
    name: str, refuses: Callable[[nn.Module], str] = lambda module: "", **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated `install(site, **options)` under `name`; `more` are fields of Kernel."""

    def register(install: Callable[..., Any]) -> Callable[..., Any]:
        if name in KERNELS:
            raise ScheduleError("kernel", name, "the name is already registered", "choose another")
        KERNELS[name] = Kernel(name, install, refuses, **more)
        return install

    return register


def kernel(
    name: str,
    reference: Callable[..., Any],
    inputs: Callable[..., dict[str, Any]],
    shapes: Sequence[tuple[int, ...]],
    serves: Mapping[str, Callable[..., Any]] | None = None,
    cannot: Callable[[Any], str] = lambda module: "",
    cpu: str = "torch",
    sites: Callable[[Any], list[str]] | None = None,
    limits: Callable[[Tensor], str] = lambda x: "",
    passes: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the fast path of `reference`.

    Args:
        name: as in `replace(name)`.
        reference: the definition.
        inputs: test shape --> keyword arguments of both.
        shapes: that it is tested on.
        serves: class names, without importing the classes, and the forward that each gets.
        cannot: why a module of such a class cannot be served, or the empty string.
        cpu: what the entry runs on a CPU, in a word or two.
        sites: paths of a model's modules that it is for; None takes all whose class it serves.
        limits: why its Triton path cannot serve a tensor of this dtype and last axis, or "".
        passes: children whose work it does itself. Where one is replaced or hooked later, the class's own
            forward runs.
    """
    forwards = dict(serves or {})

    def refuses(module: nn.Module) -> str:
        if _forward_for(module, forwards) is None:
            kinds = ", ".join(sorted(forwards)) or "a function only"
            return f"found {type(module).__name__}, {name} serves {kinds}"
        return cannot(module)

    def install(site: Any, **options: Any) -> None:
        forward: Any = _forward_for(site.module, forwards)
        if passes:
            kinds = {name: type(getattr(site.module, name, None)) for name in passes}
            forward = _while_as_built(forward, kinds)
        site.module.forward = MethodType(forward, site.module)

    def register(entry: Callable[..., Any]) -> Callable[..., Any]:
        register_kernel(
            name, refuses, serves=forwards, entry=entry, reference=reference, inputs=inputs,
            shapes=tuple(shapes), paths={"cpu": cpu, "cuda": "triton"}, sites=sites, limits=limits,
        )(install)  # fmt: skip
        return entry

    return register


@cache
def load_kernels() -> dict[str, Kernel]:
    """Import every file of `kernels/`; each registers its own. Triton is not imported."""
    package = importlib.import_module("slapo_zoo.kernels")
    for found in pkgutil.iter_modules(package.__path__):
        if "triton" not in found.name:
            importlib.import_module(f"{package.__name__}.{found.name}")
    return KERNELS


def _while_as_built(forward: Callable[..., Any], kinds: dict[str, type]) -> Callable[..., Any]:
    """`forward` while the children it passes by are of these classes and nobody sees their calls."""

    @wraps(forward)
    def served(module: Any, *args: Any, **kwargs: Any) -> Any:
        children = {name: getattr(module, name, None) for name in kinds}
        if any(type(c) is not kinds[n] or is_hooked(c) for n, c in children.items()):
            return type(module).forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return served


def is_hooked(module: Any) -> bool:
    """Whether someone else than a schedule wants to see its calls."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = [hook for kind in kinds for hook in getattr(module, kind, {}).values()]
    return any(not str(getattr(h, "__module__", "")).startswith("slapo_zoo") for h in hooks)


def _forward_for(module: nn.Module, forwards: Mapping[str, Any]) -> Callable[..., Any] | None:
    found = (forwards[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in forwards)
    return next(found, None)


def operator(
    name: str,
    fake: Callable[..., Any],
    setup: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """The decorated function becomes torch.ops.slapo_zoo.<name>, which compilers see as one node.

    Args:
        name: of the operator.
        fake: shapes and dtypes of its outputs.
        setup: (ctx, inputs, output), what the backward needs.
        backward: (ctx, *grads) --> gradients of the inputs; without it there are none.
    """

    def register(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=())
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(once(backward), setup_context=setup)
        return op

    return register


_forced: list[str] = []


@contextmanager
def force(path: str) -> Iterator[None]:
    """Within it, "triton" or "torch" runs on GPUs whatever was measured (tests, benchmarks)."""
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def runs_triton(name: str, x: Tensor) -> bool:
    """Whether the Triton path of a kernel runs for x: where it was measured not to be slower."""
    if x.dtype not in TRITON_DTYPES or not HAS_TRITON:
        return False
    if INTERPRETED or x.device.type == "cpu":
        return INTERPRETED
    if _forced:
        return _forced[-1] == "triton"
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else x.device.type
    return _decided(name, str(x.dtype)[6:], int(x.shape[-1]), device, changes())


@lru_cache(maxsize=1024)
def _decided(name: str, dtype: str, size: int, device: str, tables: int) -> bool:
    """What `kernels="auto"` decided; where only the prior speaks, torch runs inside of the kernel."""
    known = any(key.startswith(f"{name}:") for key in table_of(device).dispatch)
    return known and decide(name, dtype, size, device).runs


def in_triton(x: Tensor) -> bool:
    """Whether an operator's body, once it was called, uses Triton for x."""
    return HAS_TRITON and x.dtype in TRITON_DTYPES and (x.is_cuda or INTERPRETED)


def bucket(name: str, x: Tensor) -> str:
    """The key of the dispatch table: kernel, dtype and the last axis, up to a power of two."""
    return f"{name}:{str(x.dtype)[6:]}:{1 << (int(x.shape[-1]) - 1).bit_length()}"


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
