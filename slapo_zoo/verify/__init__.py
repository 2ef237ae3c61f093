"""Comparison of a sharded model with plain `transformers`: outputs, gradients, an AdamW step, dropout, saved files.

The package is callable: after `from slapo_zoo import verify`, `verify(...)` calls
`slapo_zoo.verify.core.verify`. Among the packages of slapo_zoo it imports `model` and those below `model` in the
list of CONTRIBUTING.md.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("slapo_zoo.verify.core").verify(*args, **kwargs)


verify = sys.modules[__name__]
verify.__class__ = _Callable
