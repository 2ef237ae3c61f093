"""Kernel registry: what `replace(name)` may put into a module, and which path runs on a device."""

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.dispatch.fast_enough import decide
from slapo_zoo.dispatch.tables import UNMEASURED, changes, table_of
from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel.once import once

NAMESPACE = "slapo_zoo"  # of the operators, in torch.ops
KNOWN = ("transformers", "torch", NAMESPACE)  # packages whose classes kernels stand for
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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
        serves: class names of modules, and the forward that each gets; a class of such a name with a
            forward of its own is none of them.
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
        """Return why it runs as torch operations on a GPU, whatever was measured, or the empty string."""
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
    name: str, refuses: Callable[[nn.Module], str] = lambda module: "", passes: Sequence[str] = (),
    **more: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register the decorated `install(site, **options)` under `name`; `more` are fields of Kernel."""
    served = more.get("serves")

    def unfit(module: nn.Module) -> str:
        return (served and _unlike(module, name, served, passes)) or refuses(module)

    def register(install: Callable[..., Any]) -> Callable[..., Any]:
        if name in KERNELS:
            raise ScheduleError("kernel", name, "the name is already registered", "choose another")
        KERNELS[name] = Kernel(name, install, unfit, **more)
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
        passes: children whose work it does itself. Where one is replaced, patched or hooked later, the
            class's own forward runs.
    """
    forwards = dict(serves or {})

    def install(site: Any, **options: Any) -> None:
        forward = forwards[served_class(site.module, forwards).__name__]
        forward = _while_as_built(forward, site.module, passes)
        site.module.forward = MethodType(forward, site.module)

    def register(entry: Callable[..., Any]) -> Callable[..., Any]:
        register_kernel(
            name, cannot, passes, serves=forwards, entry=entry, reference=reference, inputs=inputs,
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


def _while_as_built(
    forward: Callable[..., Any], module: nn.Module, passes: Sequence[str]
) -> Callable[..., Any]:
    """Return a forward that runs `forward` as long as nobody patches the class or the children that it bypasses."""
    own, kinds = type(module).forward, {name: _kind(getattr(module, name, None)) for name in passes}

    @wraps(forward)
    def served(module: Any, *args: Any, **kwargs: Any) -> Any:
        children = {name: getattr(module, name, None) for name in kinds}
        others = any(_kind(c) != kinds[n] or is_changed(c) for n, c in children.items())
        if others or type(module).forward is not own:
            return type(module).forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return served


def _kind(module: Any) -> tuple[type, Any]:
    return type(module), getattr(type(module), "forward", None)


def served_class(module: nn.Module, serves: Collection[str]) -> Any:
    """The first class of a module, from its own upwards, whose name a kernel serves."""
    return next((cls for cls in type(module).__mro__ if cls.__name__ in serves), None)


def _unlike(module: nn.Module, name: str, serves: Mapping[str, Any], passes: Sequence[str]) -> str:
    """Return why a module is none of those that a kernel was written for, or the empty string."""
    found, own = served_class(module, serves), type(module)
    if found is None:
        kinds = ", ".join(sorted(serves)) or "a function only"
        return f"found {own.__name__}, {name} serves {kinds}"
    packages = *KNOWN, package_of(serves[found.__name__])
    if package_of(found) not in packages or own.forward is not found.forward:
        mine = f"{own.__name__} of {own.__module__} with a forward of its own"
        return f"found {mine}, {name} stands for that of {found.__name__} in transformers"
    parts = {
        own.__name__: module,
        **{f"{own.__name__}.{n}": getattr(module, n, None) for n in passes},
    }
    changed = [
        n for n, m in parts.items() if m is not None and (is_changed(m) or not as_written(type(m)))
    ]
    return f"{changed[0]} was patched or hooked" if changed else ""


def as_written(cls: type) -> bool:
    """Return whether a class of modules has the functions that its own file defines, down to its forward."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        own = vars(base)
        if not all(_is_of(base, f) for n, f in own.items() if n == "forward" or n[:2] != "__"):
            return False
        if "forward" in own:
            break
    return True


def _is_of(cls: type, value: Any) -> bool:
    """Return whether what a class has is no function, or one that its file defines; libraries may wrap it."""
    function, packages = getattr(value, "__func__", value), (*KNOWN, package_of(cls))
    if not isinstance(function, FunctionType):
        return value is not vars(cls).get("forward")
    while hasattr(function, "__wrapped__"):
        if package_of(function) not in packages:
            return False
        function = function.__wrapped__
    return function.__globals__["__name__"] == cls.__module__


def package_of(what: Any) -> str:
    """The package in which a class or a function was written, whatever it wraps."""
    function = isinstance(what, FunctionType)
    return str(what.__globals__["__name__"] if function else what.__module__).partition(".")[0]


def is_changed(module: Any) -> bool:
    """Return whether someone else than a schedule sees the calls of a module, or does its work."""
    forward = getattr(module, "__dict__", {}).get("forward")
    while (inner := getattr(forward, "__func__", getattr(forward, "func", None))) is not None:
        forward = inner
    maker = forward if isinstance(forward, FunctionType) else type(forward)
    return (forward is not None and package_of(maker) != NAMESPACE) or is_hooked(module)


def is_hooked(module: Any) -> bool:
    """Return whether someone else than a schedule wants to see its calls."""
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind, {}).values()]
    return any(not str(getattr(h, "__module__", "")).startswith("slapo_zoo") for h in hooks)


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
    """Context in which "triton" or "torch" runs on GPUs whatever was measured (tests, benchmarks)."""
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def runs_triton(name: str, x: Tensor) -> bool:
    """Return whether the Triton path of a kernel runs for x: where it was measured not to be slower."""
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
    """Return the decision of `kernels="auto"`; where nothing was measured, torch runs inside the kernel."""
    known = any(key.startswith(f"{name}:") for key in table_of(device).dispatch)
    return known and decide(name, dtype, size, device).runs


def in_triton(x: Tensor) -> bool:
    """Return whether an operator's body, once it was called, uses Triton for x."""
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
