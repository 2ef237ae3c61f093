"""Which values one part of a model makes and another part uses, read off the tape of a forward.

Of every call of a *unit* (a block, an embedding, a norm, a head) a plan knows what it returned, and the
outputs of which earlier calls its arguments were computed from. From this follows what crosses a cut.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.tape import LEAVE, Ref, Row

GUESS = "guess"  # a module looked at data: its output is taken to be like its input


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

    def with_written(self, leaf: int) -> "Call":
        """The same, while something beside the units writes into a tensor of its output."""
        leaves = list(self.leaves)
        leaves[leaf] = replace(leaves[leaf], written=True)
        return replace(self, leaves=tuple(leaves))

    def output(self, tensors: Mapping[int, Tensor], device: torch.device) -> Any:
        """The output with the given tensors, and stand-ins for all others."""
        leaves = [
            (self.keep(i, tensors[i]) if i in tensors else leaf.stand_in(device))
            if isinstance(leaf, Shape) else leaf
            for i, leaf in enumerate(self.leaves)
        ]  # fmt: skip
        return tree_unflatten(leaves, self.spec)


def calls_of(rows: Iterable[Row]) -> list[Call]:
    """The calls of units on a tape, in order.

    What an operator returns comes from wherever its arguments came from.
    """
    calls: list[Call] = []
    origin: dict[int, frozenset[Value]] = {}
    guessed = False

    def origins(refs: Iterable[Ref]) -> frozenset[Value]:
        return frozenset().union(*(origin.get(ref.number, ()) for ref in refs))

    for row in rows:
        guessed |= row.op == GUESS
        if row.op == LEAVE and row.output is not None:
            leaves, spec = row.output
            shapes = tuple(map(_shape, leaves))
            calls.append(Call(row.path, spec, shapes, origins(row.reads), guessed))
            for i, x in enumerate(leaves):
                if isinstance(x, Ref):
                    origin[x.number] = frozenset({Value(len(calls) - 1, i)})
            guessed = False
            continue
        for value in origins(row.changes) if not row.unit else ():
            calls[value.call] = calls[value.call].with_written(value.leaf)
        found = origins(row.reads)
        for ref in row.writes:
            origin[ref.number] = origin.get(ref.number, frozenset()) | found
    return calls


def _shape(x: Any) -> Any:
    return Shape(x.shape, x.dtype, x.requires_grad) if isinstance(x, Ref) else x
