"""ZeRO-3: a block's parameters are whole only while it runs, forward or backward.

rewrite:  y = block(x)  -->  w = all_gather(parts);  y = block(x; w);  w is forgotten

What autograd keeps of `w` for the backward is not the tensor but which one it was: the first operation
that asks for it gathers the block again. Whoever runs a block's forward once more (a checkpoint of torch)
has it gathered, too. Source: arXiv:1910.02054, section 5.3.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from slapo_zoo.errors import MeshError
from slapo_zoo.language.offload import Kept, Pack, unpack
from slapo_zoo.model.dp.gathered import Group
from slapo_zoo.parallel.compat import hooks_around
from slapo_zoo.parallel.local_tensors import is_divided

BLOCK = "_slapo_block"  # of a module: its Block


@dataclass(eq=False)
class Saved(Kept):
    """A tensor that autograd would keep, and that is one of a block's whole tensors or a view of it."""

    block: "Block"
    place: tuple[int, int]
    layout: tuple[Any, Any, int]

    def again(self) -> Tensor:
        """Return the unsharded tensor, gathered again if it was dropped."""
        group, index = self.place
        return self.block.whole()[group][index].as_strided(*self.layout)


@dataclass(eq=False)
class Passed(Kept):
    """A tensor that hooks around the block keep: those of a checkpoint, or `save_on_cpu`."""

    kept: Any
    unpack: Callable[[Any], Tensor]

    def again(self) -> Tensor:
        """Return the activation as the other hooks give it back."""
        return self.unpack(self.kept)


class Block:
    """One block whose parameters are gathered when it runs.

    Args:
        blocks: all of them, in the order in which they run.
        groups: its parameters, by what one collective gathers.
        places: (module, name, (group, index)) that read a parameter.
        position: among the blocks of the whole model; those of one stage are neighbours.
    """

    def __init__(
        self, blocks: "Blocks", groups: Sequence[Group], places: Sequence[tuple[Any, str, Any]],
        position: int,
    ):  # fmt: skip
        self.blocks, self.groups, self.places = blocks, groups, places
        self.position = position
        self._running: list[Any] = []

    def begin(self) -> None:
        """Start the all-gather of the block's parameters."""
        for group in self.groups:
            group.begin(group.dtype_of(self.blocks.computes))

    def drop(self) -> None:
        """Forget whole tensors that nothing reads now."""
        for group in self.groups:
            group.drop()

    def whole(self) -> list[list[Tensor]]:
        """Whole tensors for a backward; those of the block before it are on their way."""
        self.blocks.keep(self, self.position - 1)
        return [group.whole(group.dtype_of(self.blocks.computes)) for group in self.groups]

    def before(self, module: nn.Module, args: Any) -> None:
        """Before a block's forward: put gathered parameters into its modules, and keep autograd from saving them."""
        self._require_own(module)
        computes = self.blocks.computes
        whole = [group.traced(group.dtype_of(computes)) for group in self.groups]
        self.blocks.keep(self, self.position + 1)
        self._put(whole)
        found = {x.untyped_storage()._cdata: ((i, j), x.dtype)
                 for i, group in enumerate(whole) for j, x in enumerate(group) if x.numel()}  # fmt: skip
        around = hooks_around()

        def pack(x: Tensor) -> Any:
            place, dtype = found.get(x.untyped_storage()._cdata, (None, None))
            if place is None or x.dtype != dtype:
                return Passed(around[0](x), around[1]) if around else x
            return Saved(self, place, (x.size(), x.stride(), x.storage_offset()))

        hooks = saved_tensors_hooks(pack, unpack)
        self._running.append(hooks)
        self.blocks.keeps.append(pack)
        self.blocks.running.append(self)
        hooks.__enter__()

    def _require_own(self, module: nn.Module) -> None:
        """Raise MeshError for a module that was moved into this block: its weights are not gathered with it."""
        reading = {id(at) for at, *_ in self.places}
        for path, m in module.named_modules():
            if id(m) not in reading and any(map(is_divided, m._parameters.values())):
                problem = f"{path}: it was no part of this block when the model was loaded"
                hint = "change the plain model, save it, and load that; or leave dp_shard out"
                raise MeshError("forward", type(module).__name__, problem, hint)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a block's forward: put the shards back."""
        if self._running:  # else it failed before it began
            self._running.pop().__exit__(None, None, None)
            self.blocks.running.pop()
            self.blocks.keeps.pop()
            self._take()

    def _put(self, whole: Sequence[Sequence[Tensor]]) -> None:
        for module, name, (group, index) in self.places:
            module.__dict__[name] = whole[group][index]  # is found before the parameter

    def _take(self) -> None:
        for module, name, _ in self.places:
            module.__dict__.pop(name, None)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Context in which the modules read whole tensors, whose backward sums over dp, unless they do already."""
        module, name, _ = self.places[0]
        if name in module.__dict__:
            yield
            return
        self._put([group.traced(group.dtype_of(self.blocks.computes)) for group in self.groups])
        try:
            yield
        finally:
            self._take()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context in which the modules read what they read in the forward."""
        pairs = zip(self.whole(), self.groups, strict=True)
        self._put([[x.detach().requires_grad_(p.requires_grad)
                    for x, p in zip(whole, group.parameters, strict=True)]
                   for whole, group in pairs])  # fmt: skip
        try:
            yield
        finally:
            self._take()


class Blocks:
    """The blocks of one rank whose parameters are gathered when they run.

    Args:
        computes: dtype in which the model computes; None: in that of its parameters.
        keeps: where a block that runs says how its weights are kept.
    """

    def __init__(self, computes: torch.dtype | None, keeps: list[Pack]):
        self.computes, self.keeps = computes, keeps
        self.at: dict[int, Block] = {}
        self.running: list[Block] = []
        self._kept: list[Block] = []

    def add(self, module: nn.Module, groups: Sequence[Group], places: Any, position: int) -> None:
        """Gather a block's parameters when it runs."""
        block = self.at[position] = Block(self, groups, places, position)
        module.__dict__[BLOCK], module.__class__ = block, _gathering(type(module))
        module.register_forward_pre_hook(block.before)
        module.register_forward_hook(block.after, always_call=True)

    def keep(self, block: Block, following: int) -> None:
        """Drop all gathered blocks but this one, and start to gather the one that runs next."""
        ahead = [self.at[following]] if following in self.at else []
        for other in self._kept:
            if other is not block and other not in ahead:
                other.drop()
        for other in ahead:
            other.begin()
        self._kept = [block, *ahead]

    def forget(self) -> None:
        """Drop all gathered parameters at the end of a step."""
        for block in self._kept:
            block.drop()
        self._kept = []

    def again(self) -> Callable[[], AbstractContextManager]:
        """Return a maker of contexts around a recomputation of what runs now."""
        return self.running[-1].recomputing if self.running else nullcontext


@functools.cache
def _gathering(cls: Any) -> type:
    """The class of a block whose forward gathers what it reads where no call of the block has done it."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__[BLOCK].lent():
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward})
