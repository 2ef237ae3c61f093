"""Dataflow between the units of a model (block, embedding, norm, head), from the recorded operators of a forward.

For every call of a unit the dataflow gives the output, and the outputs of earlier calls from which its arguments were
computed. The values that must be sent from one pipeline stage to the next follow from this.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.tape import LEAVE, Ref, Row

GUESS = "guess"  # row: a module branched on data; its output is assumed like its input


class Value(NamedTuple):
    """Name of a tensor: item `leaf` of the flattened output of unit call number `call` in a recorded forward."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Shape:
    """Shape and dtype of a tensor that a block, embedding or head returns; `written`: later code changes it in place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    written: bool = False

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor of this shape, to receive into."""
        grad = self.requires_grad and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=grad)

    def stand_in(self, device: torch.device) -> Tensor:
        """Return zeros for a tensor that this stage never reads: one element, expanded, unless later code writes it."""
        if self.written:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of a unit (a block, embedding or head, which pipeline stages never split) in a dry run's forward.

    Args:
        unit: path of the unit.
        spec: pytree structure of its output.
        leaves: its flattened output, with a Shape in place of each tensor.
        needs: the Value of each earlier output from which the arguments were computed; for the last call also of those
            that the rest of the forward uses or returns (CLIP's two towers).
        guessed: True if the unit branches on hidden states, so that its output was assumed to be shaped like its input.
    """

    unit: str
    spec: TreeSpec
    leaves: tuple[Any, ...]
    needs: frozenset[Value]
    guessed: bool = False

    def keep(self, leaf: int, tensor: Tensor) -> Tensor:
        """Return `tensor`, item `leaf` of the output, to send later; a clone if later code of the forward writes into it."""
        return tensor.clone() if self.leaves[leaf].written else tensor

    def check(self, output: Any) -> None:
        """Raise ScheduleError if the dry run `guessed` this call's output shapes, and the real `output` has others."""
        if not self.guessed:
            return
        leaves, spec = tree_flatten(output)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves]
        wanted = [x.shape if isinstance(x, Shape) else None for x in self.leaves]
        if spec != self.spec or shapes != wanted:
            problem = f"the output has the shapes {shapes}, expected {wanted} as in the dry run: the shapes depend on data"
            hint = "use pp=1: pipeline stages must know the shapes before a step"
            raise ScheduleError(self.unit, "pipeline", problem, hint)

    def with_written(self, leaf: int) -> "Call":
        """Return a copy in which item `leaf` of the flat output is marked `written` by later code: `keep` clones it."""
        leaves = list(self.leaves)
        leaves[leaf] = replace(leaves[leaf], written=True)
        return replace(self, leaves=tuple(leaves))

    def output(self, tensors: Mapping[int, Tensor], device: torch.device) -> Any:
        """Return the output with `tensors` (index in the flat output --> tensor), and zeros on `device` for others."""
        leaves = [
            (self.keep(i, tensors[i]) if i in tensors else leaf.stand_in(device))
            if isinstance(leaf, Shape) else leaf
            for i, leaf in enumerate(self.leaves)
        ]  # fmt: skip
        return tree_unflatten(leaves, self.spec)


def calls_of(rows: Iterable[Row]) -> list[Call]:
    """Return a Call for each call of a block, embedding or head in `rows`, the operators of a recorded forward."""
    calls: list[Call] = []
    origin: dict[int, frozenset[Value]] = {}
    guessed, rest = False, frozenset[Value]()

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
            guessed, rest = False, frozenset()
            continue
        for value in origins(row.changes) if not row.unit else ():
            calls[value.call] = calls[value.call].with_written(value.leaf)
        found = origins(row.reads)
        rest |= frozenset() if row.backward else found
        for ref in row.writes:
            origin[ref.number] = origin.get(ref.number, frozenset()) | found
    return [*calls[:-1], *(replace(last, needs=last.needs | rest) for last in calls[-1:])]


def _shape(x: Any) -> Any:
    return Shape(x.shape, x.dtype, x.requires_grad) if isinstance(x, Ref) else x
