"""Proxy of a module in which some attributes have other values."""

from collections.abc import Mapping
from typing import Any

from torch import nn


class Seen:
    """Proxy of a module in which some attributes have other values: `Seen(module, {"eps": x}).eps` is x."""

    def __init__(self, module: nn.Module, values: Mapping[str, Any]):
        self._module, self._values = module, values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._values[name] if name in self._values else getattr(self._module, name)
