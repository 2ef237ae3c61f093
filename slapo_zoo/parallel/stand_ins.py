"""Casts and gathered weights stand before the parameters of a module while its forward runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def as_read_now(root: Any) -> Callable[[], AbstractContextManager]:
    """Return a maker of contexts in which modules read the weights that now stand in for their parameters.

    Casts and gathered weights stand there while a forward runs; logits may be made after it.
    """
    found = [(module, name, module.__dict__[name]) for module in root.modules()
             for name in module._parameters if name in module.__dict__]  # fmt: skip

    @contextmanager
    def again() -> Iterator[None]:
        before = [module.__dict__.get(name) for module, name, _ in found]
        for module, name, weight in found:
            module.__dict__[name] = weight
        try:
            yield
        finally:
            for (module, name, _), weight in zip(found, before, strict=True):
                if weight is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = weight

    return again if found else nullcontext
