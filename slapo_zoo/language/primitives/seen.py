"""Proxy of a module in which some attributes have other values."""

from collections.abc import Mapping
from typing import Any

from torch import nn


class Seen:
    """Proxy of a module: `Seen(module, {"eps": x}).eps` is x, all other public attributes are the module's own."""

    def __init__(self, module: nn.Module, values: Mapping[str, Any]):
        self._module, self._values = module, values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            kind = type(self.__dict__.get("_module")).__name__
            hidden = "sync_rms_norm() and vocab_bias() hide: make the attribute public"
            raise AttributeError(f"the forward of {kind} reads {name!r}, which {hidden}")
        return self._values[name] if name in self._values else getattr(self._module, name)
