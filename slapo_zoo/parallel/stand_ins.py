"""Access to the tensors that temporarily replace parameters: casts and gathered weights during a forward."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def as_read_now(root: Any) -> Callable[[], AbstractContextManager]:
    """Return a function that makes contexts in which modules below `root` read the weights that
    they read now (casts, gathered shards).

    It serves code that runs after the forward, such as logits that are computed on demand.
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
