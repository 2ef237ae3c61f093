"""Which values one part of a model makes and another part uses, found by a dry run.

The scheduled model runs once on fake tensors: shapes without data. Every call of a *unit* (a block, an
embedding, a norm, a head) is recorded: what it returned, and the outputs of which earlier calls its
arguments were computed from. From this follows what crosses a pipeline cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import ScheduleError


class Value(NamedTuple):
    """The `leaf`-th tensor that the `call`-th unit call returned."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Shape:
    """A tensor without its data; `written`: something beside the units changes it in place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    written: bool = False

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor to receive into."""
        grad = self.requires_grad and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=grad)

    def stand_in(self, device: torch.device) -> Tensor:
        """Zeros for a value that nothing on this stage uses; they take no memory unless written."""
        if self.written:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of a unit: its path, its output (tensors as Shapes), and what it was made from.

    `guessed`: within it the forward looks at data, so that its output is only taken to be such.
    """

    unit: str
    spec: TreeSpec
    leaves: tuple[Any, ...]
    needs: frozenset[Value]
    guessed: bool = False

    def keep(self, leaf: int, tensor: Tensor) -> Tensor:
        """A tensor of the output, or a copy where it will be written: the next stage writes its own."""
        return tensor.clone() if self.leaves[leaf].written else tensor

    def check(self, output: Any) -> None:
        """Refuse an output that is not as it was guessed."""
        if not self.guessed:
            return
        leaves, spec = tree_flatten(output)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves]
        wanted = [x.shape if isinstance(x, Shape) else None for x in self.leaves]
        if spec != self.spec or shapes != wanted:
            problem = f"its output has the shapes {shapes}, expected {wanted}: they depend on data"
            raise ScheduleError(self.unit, "pipeline", problem, "use pp=1")

    def output(self, tensors: Mapping[int, Tensor], device: torch.device) -> Any:
        """The output with the given tensors, and stand-ins for all others."""
        leaves = [
            (self.keep(i, tensors[i]) if i in tensors else leaf.stand_in(device))
            if isinstance(leaf, Shape) else leaf
            for i, leaf in enumerate(self.leaves)
        ]  # fmt: skip
        return tree_unflatten(leaves, self.spec)


class DryRun(TorchDispatchMode):
    """Records the calls of units while a model runs on fake tensors."""

    def __init__(self, model: nn.Module, units: Sequence[str]):
        super().__init__()
        self.calls: list[Call] = []
        self._origin: Any = WeakIdKeyDictionary()
        self._inside = False  # of a unit
        self._hooks = []
        for unit in units:
            module = model.get_submodule(unit)
            self._hooks.append(module.register_forward_pre_hook(self._before))
            self._hooks.append(module.register_forward_hook(self._after(unit), with_kwargs=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every output of an operation comes from wherever its inputs came from."""
        if func._schema.is_mutable and not self._inside:
            self._note_written(args[0])
        out = func(*args, **(kwargs or {}))
        origin = self._origins((args, kwargs))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._origin[tensor] = self._origin.get(tensor, frozenset()) | origin
        return out

    def _note_written(self, tensor: Any) -> None:
        for call, leaf in self._origins(tensor):
            leaves = list(self.calls[call].leaves)
            leaves[leaf] = replace(leaves[leaf], written=True)
            self.calls[call] = replace(self.calls[call], leaves=tuple(leaves))

    def _before(self, module: nn.Module, args: Any) -> None:
        self._inside = True

    def _origins(self, tree: Any) -> frozenset[Value]:
        found = [self._origin.get(x) for x in tree_leaves(tree) if isinstance(x, Tensor)]
        return frozenset().union(*(f for f in found if f))

    def _after(self, unit: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._inside = False
            leaves, spec = tree_flatten(output)
            needs, index = self._origins((args, kwargs)), len(self.calls)
            shapes = [
                Shape(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
                for x in leaves
            ]
            self.calls.append(Call(unit, spec, tuple(shapes), needs))
            for i, tensor in enumerate(leaves):
                if isinstance(tensor, Tensor):
                    self._origin[tensor] = frozenset({Value(index, i)})

        return record

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Calls(list[Call]):
    """The calls of a dry run; `looked`: they hold for the data of its batch only."""

    def __init__(self, calls: Sequence[Call], looked: bool = False):
        super().__init__(calls)
        self.looked = looked
