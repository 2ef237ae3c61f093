"""Contexts in which modules read other tensors as their parameters: casts or gathered weights, during a forward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

# a module, the name of a parameter of it, the tensor that it reads in place of the parameter
Place = tuple[Any, str, Any]


@contextmanager
def standing_in(places: Iterable[Place]) -> Iterator[None]:
    """Context in which, for each of `places` (module, name, tensor), the module reads `tensor` as its parameter `name`."""
    held = list(places)
    before = [module.__dict__.get(name) for module, name, _ in held]
    for module, name, tensor in held:
        module.__dict__[name] = tensor  # is found before the parameter
    try:
        yield
    finally:
        for (module, name, _), tensor in zip(held, before, strict=True):
            if tensor is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = tensor


def as_read_now(root: Any) -> Callable[[], AbstractContextManager]:
    """Return a function f: in `with f():` the module `root` and its submodules read the tensors that stand in place of
    their parameters now (casts, gathered weights; references, no copies).

    Code that runs after the forward, such as logits that are computed on demand, uses f.
    """
    found = [(module, name, module.__dict__[name]) for module in root.modules()
             for name in module._parameters if name in module.__dict__]  # fmt: skip
    return partial(standing_in, found) if found else nullcontext
