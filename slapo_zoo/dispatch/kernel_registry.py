"""Registry of kernels: those that `replace(name)` can install in modules; on each device Triton or torch runs them."""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel.once import once, runs_at_once

NAMESPACE = "slapo_zoo"  # namespace of our operators in torch.ops
KNOWN = ("transformers", "torch", NAMESPACE)  # packages whose classes kernels serve
PLAIN = (Tensor, nn.Parameter)  # classes of tensors that dispatch nothing to Python
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Kernel:
    """Faster implementation of a module's forward.

    Args:
        name: name for a schedule's `replace(name)`.
        install: function (site, **options) that replaces the forward of `site.module`, the module that the schedule
            changes, and adds no key to the state dict. The options are those of `replace`.
        refuses: function (module) --> why the kernel cannot serve it, or "" if it can.
        serves: class name --> forward that modules of the class get; classes that neither torch, transformers
            nor the kernel's package defines, and subclasses with a forward of their own, are excluded.
        entry: the public function that computes the operation.
        reference: definition of the result in plain torch operations.
        inputs: maps a test shape to keyword arguments of `entry` and `reference`.
        shapes: shapes that the kernel is tested on.
        paths: device type --> what computes the kernel there: "triton", "torch" or a few words, e.g. "F.gelu, mul".
        sites: maps a model to the paths of modules that get the kernel; None: all of the classes in `serves`.
        runs_inside: True if the kernel calls the children of the module that it serves, so that the children may have
            kernels too.
        innermost: True if the kernel (that of linears) may also serve modules inside a module of another kernel,
            because every kernel calls such modules.
        limits: function (input) --> why its dtype or last axis does not suit the Triton code, or "" if both do.
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


KERNELS: dict[str, Kernel] = {}


def register_kernel(
    name: str, refuses: Callable[[nn.Module], str] = lambda module: "", passes: Sequence[str] = (),
    **more: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Return a decorator for a function `install(site, **options)` that puts the kernel `name` into `site.module`.

    Args:
        name: name by which a schedule's `replace(name, **options)` installs it in the module `site.module`.
        refuses: function (module) --> why the kernel cannot serve it, or "" if it can.
        passes: names of the module's children whose work the kernel does itself, without calling them.
        **more: other fields of Kernel.
    """
    served = more.get("serves")

    def unfit(module: nn.Module) -> str:
        return (served and _unfit(module, name, served, passes)) or refuses(module)

    def register(install: Callable[..., Any]) -> Callable[..., Any]:
        if name in KERNELS:
            hint = "choose another name"
            raise ScheduleError("kernel", name, "the name is already registered", hint)
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
    """Return a decorator that registers a function as the kernel `name`, the fast implementation of `reference`.

    Args:
        name: name for `replace(name)`.
        reference: definition of the result in plain torch operations.
        inputs: maps a test shape to keyword arguments of the kernel and of `reference`.
        shapes: shapes that the kernel is tested on.
        serves: class name --> forward that modules of the class get; the classes are not imported.
        cannot: function (module of a class in `serves`) --> why the kernel cannot serve it, or "" if it can.
        cpu: what computes the kernel on a CPU, as text to show to users, e.g. "F.gelu, mul".
        sites: maps a model to the paths of modules that get the kernel; None: all of the classes in `serves`.
        limits: function (input) --> why its dtype or last axis does not suit the Triton code, or "" if both do.
        passes: names of the served module's children and attributes whose work the kernel does itself. When one is
            replaced, patched or hooked later, the class's own forward runs instead of the kernel.
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
    """Register all kernels by importing every file of `kernels/` but the Triton code; return {kernel name: Kernel}."""
    package = importlib.import_module("slapo_zoo.kernels")
    for found in pkgutil.iter_modules(package.__path__):
        if "triton" not in found.name:
            importlib.import_module(f"{package.__name__}.{found.name}")
    return KERNELS


def _while_as_built(
    forward: Callable[..., Any], module: nn.Module, passes: Sequence[str]
) -> Callable[..., Any]:
    """Return a forward for `module` that runs the kernel's `forward`. It runs the class's forward instead if later code
    has patched the class, or changed or hooked a child named in `passes`, whose work the kernel does itself.
    """
    own, kinds = type(module).forward, {name: _kind(getattr(module, name, None)) for name in passes}

    @wraps(forward)
    def served(module: Any, *args: Any, **kwargs: Any) -> Any:
        children = {name: getattr(module, name, None) for name in kinds}
        others = any(_kind(c) != kinds[n] or is_changed(c) for n, c in children.items())
        if others or type(module).forward is not own:
            return type(module).forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return served


def _kind(x: Any) -> Any:
    return (type(x), type(x).forward) if isinstance(x, nn.Module) else x


def served_class(module: nn.Module, serves: Collection[str]) -> Any:
    """Return the first class in the MRO of a module's class whose name is in `serves` (class names), or None."""
    return next((cls for cls in type(module).__mro__ if cls.__name__ in serves), None)


def _unfit(module: nn.Module, name: str, serves: Mapping[str, Any], passes: Sequence[str]) -> str:
    """Return why kernel `name` does not fit a module, or "" if it does. The class that defines the module's forward
    must be a key of `serves` (class name --> forward with the kernel), from torch, transformers or the kernel's
    package. Neither the module nor children in `passes`, whose work the kernel does itself, may be patched or hooked.
    """
    found, own = served_class(module, serves), type(module)
    if found is None:
        kinds = ", ".join(sorted(serves)) or "calls of its function, and no module"
        return f"found {own.__name__}, but the kernel {name} serves only {kinds}"
    packages = *KNOWN, package_of(serves[found.__name__])
    if package_of(found) not in packages or own.forward is not found.forward:
        mine = f"{own.__name__} of {own.__module__} with a forward of its own"
        return f"found {mine}, but the kernel {name} replaces the forward of {found.__name__} in transformers"
    children = {n: child for n, child in module.named_children() if n in passes}
    parts = {own.__name__: module} | {f"{own.__name__}.{n}": m for n, m in children.items()}
    changed = [n for n, m in parts.items() if is_changed(m) or not as_written(type(m))]
    return f"{changed[0]} was patched or hooked" if changed else ""


def as_written(cls: type) -> bool:
    """Return whether a module class still has the methods that its source file defines (nobody patched it)."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        own = vars(base)
        if not all(_is_of(base, f) for n, f in own.items() if n == "forward" or n[:2] != "__"):
            return False
        if "forward" in own:
            break
    return True


def _is_of(cls: type, value: Any) -> bool:
    """Return whether `value`, an attribute of class `cls`, is the one that the class's file defines, not a later patch.
    A function must be defined in that file; decorators of transformers, torch, slapo_zoo or the package of `cls` may
    wrap it. An object that is no function is never taken for a patch, unless it is the class's `forward`.
    """
    function, packages = getattr(value, "__func__", value), (*KNOWN, package_of(cls))
    if not isinstance(function, FunctionType):
        return value is not vars(cls).get("forward")
    while "__wrapped__" in vars(function):
        if package_of(function) not in packages:
            return False
        function = vars(function)["__wrapped__"]
    return function.__globals__["__name__"] == cls.__module__


def package_of(what: Any) -> str:
    """Return the top-level package in which `what`, a class or function, was written."""
    function = isinstance(what, FunctionType)
    return str(what.__globals__["__name__"] if function else what.__module__).partition(".")[0]


def is_changed(module: Any) -> bool:
    """Return whether code of another package than slapo_zoo has replaced a module's forward, or hooked the module."""
    forward = getattr(module, "__dict__", {}).get("forward")
    while (inner := getattr(forward, "__func__", getattr(forward, "func", None))) is not None:
        forward = inner
    maker = forward if isinstance(forward, FunctionType) else type(forward)
    return (forward is not None and package_of(maker) != NAMESPACE) or is_hooked(module)


def is_hooked(module: Any) -> bool:
    """Return whether a module has forward or backward hooks that code of another package than slapo_zoo registered."""
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind, {}).values()]
    return any(not str(getattr(h, "__module__", "")).startswith("slapo_zoo") for h in hooks)


def operator(
    name: str,
    fake: Callable[..., Any],
    setup: Any = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function the operator torch.ops.slapo_zoo.<name>, one node in compiled graphs.

    Without a compiler, transform or mode, a call runs as an autograd function, not as the operator: the host needs a
    third of the time. Both make the GPU of the first tensor the current device, on which Triton launches kernels.

    Args:
        name: name of the operator.
        fake: function of the operator's arguments that returns empty outputs of the right shapes and dtypes.
        setup: function (ctx, inputs, output) that saves in `ctx` what the backward needs; None without `backward`.
        backward: (ctx, *grads) --> gradients of the inputs; None: no gradients.
    """

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def on_device_of_first(first: Tensor, *rest: Any) -> Any:
            with torch.cuda.device_of(first):
                return function(first, *rest)

        op = torch.library.custom_op(f"{NAMESPACE}::{name}", on_device_of_first, mutates_args=())
        op.register_fake(fake)
        direct: Any = on_device_of_first
        if backward is not None:
            op.register_autograd(once(backward), setup_context=setup)

            def forward(ctx: Any, *given: Any) -> Any:
                out = on_device_of_first(*given)
                setup(ctx, given, out)
                return out

            members = {"forward": staticmethod(forward), "backward": staticmethod(once(backward))}
            direct = type(name, (torch.autograd.Function,), members).apply

        @wraps(function)
        def call(*given: Any) -> Any:
            has_graph = backward is not None or not torch.is_grad_enabled()
            if not (runs_at_once() and has_graph):
                return op(*given)
            plain = all(type(x) in PLAIN or not isinstance(x, Tensor) for x in given)
            return direct(*given) if plain else op(*given)

        return call

    return register


def bucket(name: str, x: Tensor) -> str:
    """Return "name:dtype:size", the key in timing tables; size is the last axis of `x`, rounded up to a power of two."""
    return f"{name}:{str(x.dtype)[6:]}:{1 << (int(x.shape[-1]) - 1).bit_length()}"
