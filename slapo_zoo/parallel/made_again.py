"""Handles that autograd saves in place of tensors; the backward recomputes the tensors from their handles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slapo_zoo.parallel.compat import hooks_around


@dataclass(eq=False)
class Maker:
    """Source of one tensor, in place of which autograd saves handles (`Again`): a backward recomputes the tensor at the
    first handle that it reads and frees it at the last. `handles` counts all handles, `left` those not read yet.

    Args:
        make: function that recomputes the tensor, without gradient.
        dtype: dtype of the tensor.
    """

    make: Callable[[], Tensor]
    dtype: torch.dtype
    handles: int = 0
    left: int = 0
    made: Tensor | None = None

    def tensor(self) -> Tensor:
        """Return the tensor. Each of `handles` handles calls this once: the first call makes it, the last frees it."""
        if self.made is None:
            self.made, self.left = self.make(), self.handles
        made, self.left = self.made, self.left - 1
        self.made = made if self.left else None
        return made


class Again(NamedTuple):
    """Handle that autograd saves in place of a view (size, stride, offset in `layout`) of what `maker` recomputes."""

    maker: Maker
    layout: tuple[Any, Any, int | torch.SymInt]

    def tensor(self) -> Tensor:
        """Return the view that this handle stands for, of the tensor that the `maker` recomputes."""
        return self.maker.tensor().as_strided(*self.layout)


def saving(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> AbstractContextManager[Any]:
    """Return torch's context `saved_tensors_hooks(pack, unpack)`, but save x.detach() where `pack(x)` returns x.
    Otherwise a node that saves its own output (exp, softmax) would refer to itself, and a graph whose backward runs in
    parts or never would stay in memory for ever.
    """

    def packed(x: Tensor) -> Any:
        kept = pack(x)
        return x.detach() if kept is x and x.grad_fn is not None else kept

    return saved_tensors_hooks(packed, unpack)


def made_again(
    makers: Sequence[tuple[Tensor, Callable[[], Tensor]]],
) -> AbstractContextManager[Any]:
    """Context in which autograd saves handles in place of some tensors and their views, which the backward recomputes.
    Within torch's checkpoint this has no effect, since checkpoint saves none of these tensors.

    Args:
        makers: (tensor, function that recomputes it in the same layout), for each tensor. Functions that
            communicate are called in the order of the backward, which is the same on all ranks.
    """
    around = hooks_around()
    if around and around[0].__module__ == "torch.utils.checkpoint":
        return nullcontext()
    found = {x.untyped_storage()._cdata: Maker(make, x.dtype) for x, make in makers}

    def pack(x: Tensor) -> Any:
        maker = found.get(x.untyped_storage()._cdata)
        if maker is None or x.dtype != maker.dtype:
            return around[0](x) if around else x
        maker.handles += 1
        return Again(maker, (x.size(), x.stride(), x.storage_offset()))

    after = around[1] if around else None

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Again):
            return kept.tensor()
        return after(kept) if after else kept

    return saving(pack, unpack)
