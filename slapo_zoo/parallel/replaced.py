"""Context that replaces an attribute, and restores it at its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Context in which the attribute `name`, of `owner` itself and not of its class, has the value `new`."""
    old = owner.__dict__[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)
