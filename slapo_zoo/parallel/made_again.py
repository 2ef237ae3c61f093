"""Handles in place of tensors that autograd would save: the backward makes the tensors again from them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slapo_zoo.parallel.compat import hooks_around


@dataclass(eq=False)
class Again:
    """Handle that autograd saves instead of a tensor, or instead of a view of it.

    Args:
        make: function that makes the tensor again, without gradient.
        layout: (size, stride, storage offset) of what was to be saved.
    """

    make: Callable[[], Tensor]
    layout: tuple[Any, Any, int]

    def tensor(self) -> Tensor:
        """Return the tensor, made again."""
        return self.make().as_strided(*self.layout)


def made_again(
    makers: Sequence[tuple[Tensor, Callable[[], Tensor]]],
) -> AbstractContextManager[Any]:
    """Context in which autograd saves handles in place of some tensors and of views of them.

    Within torch's checkpoint this has no effect, since checkpoint saves none of these tensors.

    Args:
        makers: (tensor, function that makes it again in the same layout), for each tensor. Where such functions
            communicate, the order of a backward, equal on all ranks, is the order of their collectives.
    """
    around = hooks_around()
    if around and around[0].__module__ == "torch.utils.checkpoint":
        return nullcontext()
    found = {x.untyped_storage()._cdata: (make, x.dtype) for x, make in makers}

    def pack(x: Tensor) -> Any:
        make, dtype = found.get(x.untyped_storage()._cdata, (None, None))
        if make is None or x.dtype != dtype:
            return around[0](x) if around else x
        return Again(make, (x.size(), x.stride(), x.storage_offset()))

    after = around[1] if around else None

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Again):
            return kept.tensor()
        return after(kept) if after else kept

    return saved_tensors_hooks(pack, unpack)
