"""ZeRO-3: the parameters of a block are gathered only while it runs, forward or backward.

rewrite:  y = block(x)  -->  w = all_gather(shards);  y = block(x; w);  w is released

Autograd saves a handle in place of `w`; the first operation of the backward that reads it gathers the
block again. A block that is recomputed (torch's checkpoint) is gathered too. Source: arXiv:1910.02054, 5.3.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import MeshError
from slapo_zoo.language.offload import Kept, Pack, unpack
from slapo_zoo.model.dp.gathered import Group
from slapo_zoo.parallel.compat import hooks_around
from slapo_zoo.parallel.local_tensors import is_divided
from slapo_zoo.parallel.made_again import saving
from slapo_zoo.parallel.stand_ins import standing_in

BLOCK = "_slapo_block"  # of a module: its Block


@dataclass(eq=False)
class Saved(Kept):
    """Handle that autograd saves instead of a gathered parameter of a block, or instead of a view of it.

    Args:
        block: the block.
        place: (index of a group of the block's parameters, index in the group).
        layout: (size, stride, storage offset) of the saved tensor.
    """

    block: "Block"
    place: tuple[int, int]
    layout: tuple[Any, Any, int]

    def again(self) -> Tensor:
        """Return the gathered tensor; gather the block again if its parameters were released."""
        group, index = self.place
        return self.block.whole()[group][index].as_strided(*self.layout)


@dataclass(eq=False)
class Passed(Kept):
    """Handle for a tensor that another library (torch's checkpoint, `save_on_cpu`) saves for the backward.

    Args:
        kept: what that library's pack function returned for the tensor.
        unpack: function of that library that restores the tensor from it.
    """

    kept: Any
    unpack: Callable[[Any], Tensor]

    def again(self) -> Tensor:
        """Return the saved tensor, restored by the library that packed it."""
        return self.unpack(self.kept)


class Block:
    """One block of the model whose parameters, sharded by ZeRO-3, are gathered when it runs.

    Args:
        blocks: all blocks of the rank.
        groups: the block's parameters, one group per collective.
        places: where modules read parameters: (module, attribute, (index of group, index in group)).
        position: index among the blocks of the whole model.
    """

    def __init__(
        self, blocks: "Blocks", groups: Sequence[Group], places: Sequence[tuple[Any, str, Any]],
        position: int,
    ):  # fmt: skip
        self.blocks, self.groups, self.places = blocks, groups, places
        self.position = position
        self._running: list[Any] = []

    def begin(self) -> None:
        """Start the all-gather over dp of the block's parameters, without waiting for it."""
        for group in self.groups:
            group.begin(group.dtype_of(self.blocks.computes))

    def drop(self) -> None:
        """Release the memory of the block's gathered parameters."""
        for group in self.groups:
            group.drop()

    def whole(self) -> list[list[Tensor]]:
        """Return the gathered parameters by group for a backward; also start to gather the block before this one."""
        self.blocks.keep(self, self.position - 1)
        return [group.whole(group.dtype_of(self.blocks.computes)) for group in self.groups]

    def before(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: put gathered parameters into the block; let autograd save handles of them."""
        self._require_own(module)
        computes = self.blocks.computes
        whole = [group.traced(group.dtype_of(computes)) for group in self.groups]
        self.blocks.keep(self, self.position + 1)
        found = {x.untyped_storage()._cdata: ((i, j), x.dtype)
                 for i, group in enumerate(whole) for j, x in enumerate(group) if x.numel()}  # fmt: skip
        around = hooks_around()

        def pack(x: Tensor) -> Any:
            place, dtype = found.get(x.untyped_storage()._cdata, (None, None))
            if place is None or x.dtype != dtype:
                return Passed(around[0](x), around[1]) if around else x
            return Saved(self, place, (x.size(), x.stride(), x.storage_offset()))

        within = ExitStack()
        within.enter_context(self._reading(whole))
        within.enter_context(saving(pack, unpack))
        self._running.append(within)
        self.blocks.keeps.append(pack)
        self.blocks.running.append(self)

    def _require_own(self, module: nn.Module) -> None:
        """Raise MeshError for a module that was moved into this block after the load: its weights are not gathered here."""
        reading = {id(at) for at, *_ in self.places}
        for path, m in module.named_modules():
            if id(m) not in reading and any(map(is_divided, m._parameters.values())):
                problem = f"its child {path} was not part of this block when the model was loaded"
                hint = "change the plain model, save it, and load that; or leave dp_shard out"
                raise MeshError("forward", type(module).__name__, problem, hint)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: put this rank's shards back in place of the gathered parameters."""
        if self._running:  # False if `before` raised
            self._running.pop().close()
            self.blocks.running.pop()
            self.blocks.keeps.pop()

    def _reading(self, whole: Sequence[Sequence[Tensor]]) -> AbstractContextManager[None]:
        """Context in which the block's modules read gathered parameters: `whole`[group][index in the group]."""
        return standing_in((module, name, whole[i][j]) for module, name, (i, j) in self.places)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the block's modules read gathered parameters; gradients are reduce-scattered over dp."""
        module, name, _ = self.places[0]
        if name in module.__dict__:
            yield
            return
        traced = [group.traced(group.dtype_of(self.blocks.computes)) for group in self.groups]
        with self._reading(traced):
            yield

    def recomputing(self) -> AbstractContextManager[None]:
        """Context in which the block's modules read gathered parameters while the block is recomputed."""
        pairs = zip(self.whole(), self.groups, strict=True)
        return self._reading([[x.detach().requires_grad_(p.requires_grad)
                               for x, p in zip(whole, group.parameters, strict=True)]
                              for whole, group in pairs])  # fmt: skip


class Blocks:
    """Blocks of one rank whose parameters are gathered when they run.

    Args:
        computes: dtype in which the model computes; None takes the dtype of its parameters.
        keeps: stack of functions, one for each block that is running, innermost last. Each function maps a
            gathered weight to the handle that autograd saves in place of the weight.
    """

    def __init__(self, computes: torch.dtype | None, keeps: list[Pack]):
        self.computes, self.keeps = computes, keeps
        self.at: dict[int, Block] = {}
        self.running: list[Block] = []
        self._kept: list[Block] = []

    def add(self, module: nn.Module, groups: Sequence[Group], places: Any, position: int) -> None:
        """Hook a block so that its parameters are gathered when it runs.

        Args:
            module: the block.
            groups: its parameters, one group per collective.
            places: where modules read parameters: (module, attribute, (index of group, index in group)).
            position: index among the blocks of the whole model.
        """
        block = self.at[position] = Block(self, groups, places, position)
        module.__dict__[BLOCK], module.__class__ = block, _gathering(type(module))
        module.register_forward_pre_hook(block.before)
        module.register_forward_hook(block.after, always_call=True)

    def keep(self, block: Block, following: int) -> None:
        """Release all gathered blocks but `block`, and start to gather the block at position `following`."""
        ahead = [self.at[following]] if following in self.at else []
        for other in self._kept:
            if other is not block and other not in ahead:
                other.drop()
        for other in ahead:
            other.begin()
        self._kept = [block, *ahead]

    def forget(self) -> None:
        """Release all gathered parameters at the end of a step."""
        for block in self._kept:
            block.drop()
        self._kept = []

    def again(self) -> Callable[[], AbstractContextManager]:
        """Return a function that makes contexts in which the block that runs now reads gathered parameters again, for
        its recomputation in the backward.
        """
        return self.running[-1].recomputing if self.running else nullcontext


@functools.cache
def _gathering(cls: Any) -> type:
    """Return a subclass of a block's class whose `forward`, called directly, gathers the parameters first."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__[BLOCK].gathered():
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward})
