"""Is a scheduled model the plain one? Outputs, gradients, a step, replicas, dropout, files.

`from slapo_zoo import verify; verify(...)` is `slapo_zoo.verify.core.verify`: the package is callable,
so that its name and the function's are one. Imports `model` and lower.
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
