"""ZeRO-3: the parameters of a transformer block are gathered only while the block runs, forward or backward.

rewrite:  y = block(x)  -->  w = all_gather(shards);  y = block(x; w);  w is released

Autograd saves a handle in place of `w`; the first operation of the backward that reads the handle gathers the
block's parameters again, as does a recomputation of the block (torch's checkpoint). Source: arXiv:1910.02054, 5.3.
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
    """Handle that autograd saves instead of a block's gathered parameter or a view of it; `again()` returns the tensor.

    Args:
        block: the block that the parameter belongs to.
        place: (i, j): the parameter is number j of those in `block.groups[i]`, which one all-gather gathers.
        layout: (size, stride, storage offset) of the saved tensor.
    """

    block: "Block"
    place: tuple[int, int]
    layout: tuple[Any, Any, int | torch.SymInt]

    def again(self) -> Tensor:
        """Return the saved tensor; the block's parameters are gathered again if they were released."""
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
        """Return the saved tensor, restored by `unpack`, the function of the library that saved it."""
        return self.unpack(self.kept)


class Block:
    """Transformer block whose parameters, sharded over dp by ZeRO-3, are gathered when the block runs.

    Args:
        blocks: all such blocks of this rank; they gather the next one ahead, and release the one before.
        groups: the block's parameters; each group is gathered by one collective.
        places: where modules read parameters: (module, attribute, (index of group, index in group)).
        position: index of the block among all blocks of the model, on all stages.
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
        """Return the gathered parameters, a list per group, for a backward; begin to gather the previous block's."""
        self.blocks.keep(self, self.position - 1)
        return [group.whole(group.dtype_of(self.blocks.computes)) for group in self.groups]

    def before(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: put gathered parameters into the block's modules; autograd saves a handle for each."""
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
        """Raise MeshError if a child of the block `module` is new since the load: no hook gathers its weights."""
        reading = {id(at) for at, *_ in self.places}
        for path, m in module.named_modules():
            if id(m) not in reading and any(map(is_divided, m._parameters.values())):
                problem = f"the block's module {path} was not in this block when the model was loaded"  # fmt: skip
                hint = "change the plain model, save it, and load that; or leave dp_shard= out"
                raise MeshError("forward", type(module).__name__, problem, hint)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: put this rank's shards back into the block's modules in place of the gathered parameters."""
        if self._running:  # False if `before` raised
            self._running.pop().close()
            self.blocks.running.pop()
            self.blocks.keeps.pop()

    def _reading(self, whole: Sequence[Sequence[Tensor]]) -> AbstractContextManager[None]:
        """Context in which the block's modules read the gathered parameters `whole`[index of group][index in the group]."""
        return standing_in((module, name, whole[i][j]) for module, name, (i, j) in self.places)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context of a direct call of the block's `forward`, without hooks: its modules read gathered parameters, whose
        backward reduce-scatters gradients. If the modules have gathered parameters already, do nothing.
        """
        module, name, _ = self.places[0]
        if name in module.__dict__:
            yield
            return
        traced = [group.traced(group.dtype_of(self.blocks.computes)) for group in self.groups]
        with self._reading(traced):
            yield

    def recomputing(self) -> AbstractContextManager[None]:
        """Context of a recomputation of the block in the backward, in which its modules read gathered parameters."""
        pairs = zip(self.whole(), self.groups, strict=True)
        return self._reading([[x.detach().requires_grad_(p.requires_grad)
                               for x, p in zip(whole, group.parameters, strict=True)]
                              for whole, group in pairs])  # fmt: skip


class Blocks:
    """Transformer blocks of one rank; ZeRO-3 gathers the parameters of each block when that block runs.

    Args:
        computes: dtype in which the model computes; None takes the dtype of its parameters.
        keeps: list of functions (gathered weight --> handle for autograd to save, which gathers it again); each block
            appends one when it begins to run, and removes it at the end.
    """

    def __init__(self, computes: torch.dtype | None, keeps: list[Pack]):
        self.computes, self.keeps = computes, keeps
        self.at: dict[int, Block] = {}
        self.running: list[Block] = []
        self._kept: list[Block] = []

    def add(self, module: nn.Module, groups: Sequence[Group], places: Any, position: int) -> None:
        """Hook a transformer block so that its parameters are gathered when the block runs.

        Args:
            module: the block.
            groups: the block's parameters; each group is gathered by one collective.
            places: where modules read parameters: (module, attribute, (index of group, index in group)).
            position: index of the block among all blocks of the model.
        """
        block = self.at[position] = Block(self, groups, places, position)
        module.__dict__[BLOCK], module.__class__ = block, _gathering(type(module))
        module.register_forward_pre_hook(block.before)
        module.register_forward_hook(block.after, always_call=True)

    def keep(self, block: Block, following: int) -> None:
        """Release the gathered parameters of all blocks but `block`; start to gather those of block number `following`."""
        ahead = [self.at[following]] if following in self.at else []
        for other in self._kept:
            if other is not block and other not in ahead:
                other.drop()
        for other in ahead:
            other.begin()
        self._kept = [block, *ahead]

    def forget(self) -> None:
        """Release the gathered parameters of all blocks, at the end of a step."""
        for block in self._kept:
            block.drop()
        self._kept = []

    def again(self) -> Callable[[], AbstractContextManager]:
        """Return a function that makes contexts for recomputing the block that runs during this call. In a context the
        block's modules read gathered parameters. If no block runs, the contexts do nothing.
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
