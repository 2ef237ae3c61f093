"""Logits that are made when somebody looks at them: a loss that needs none can still return them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TENSOR: Any = torch.Tensor  # its attributes are descriptors, which type checkers do not know
_KNOWN = {
    _TENSOR.shape.__get__, _TENSOR.dtype.__get__, _TENSOR.device.__get__, _TENSOR.ndim.__get__,
    _TENSOR.is_cuda.__get__, _TENSOR.layout.__get__, torch.Tensor.size, torch.Tensor.dim,
    torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__,
}  # fmt: skip


class LogitsOnDemand(torch.Tensor):
    """A tensor without memory whose first use, beyond its shape and dtype, calls `make`."""

    make: Callable[[], Tensor]
    made: Tensor | None

    @staticmethod
    def of(shape: tuple[int, ...], like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Logits of a shape, in the dtype and on the device of `like`, that `make()` returns."""
        wrap: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        logits = wrap(LogitsOnDemand, shape, dtype=like.dtype, device=like.device)
        logits.make, logits.made = make, None
        return logits

    def tensor(self) -> Tensor:
        """The logits, as a plain tensor; the same one every time."""
        if self.made is None:
            self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_plain(args), **_plain(kwargs or {}))


def _plain(value: Any) -> Any:
    """Nested tuples, lists and dicts with the logits made."""
    if isinstance(value, LogitsOnDemand):
        return value.tensor()
    if isinstance(value, tuple | list):
        return type(value)(_plain(v) for v in value)
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
