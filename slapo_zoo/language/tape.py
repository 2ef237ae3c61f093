"""The tape of a step: one row for everything that happens while a model runs on fake tensors.

One recorder serves whoever asks about a step before it is run: what crosses a pipeline cut, what a block
costs, which bytes are alive when, which collectives there are. Each of them reads the rows of a tape, and
holds no hook and no dispatch mode of its own. Whatever calls a collective notes it here, so nothing is
predicted from a table: recomputation, the parallel loss and a third party's operators count as they run.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.hf.models import accepts
from slapo_zoo.language.products import Product, product_of
from slapo_zoo.parallel.mesh import ShapeOnlyGroup

# What a row may be beside an operator of torch, a collective and what another module notes:
ENTER, LEAVE = "enter", "leave"  # a call of a watched module begins (of a unit: no row), ends
LOSS = "loss"  # the forward has ended, the backward begins
GRADIENT = "gradient"  # the first one of what the call number `amount` of a unit returned
SUMMED = "summed"  # the gradient of a parameter stays in `.grad`
FREE = "free"  # nothing uses the storage number `amount` any more


class Ref(NamedTuple):
    """A tensor of the step, without the tensor.

    Args:
        number: an operator that works in place returns the number that it was given.
        storage: number of the memory behind it, which views share; below 0 what was there before.
        size: bytes of this memory.
        shape: of the tensor.
        dtype: of the tensor.
        requires_grad: as modules see it; an operator sees tensors without gradients.
    """

    number: int
    storage: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class Transfer(NamedTuple):
    """One collective that one rank takes part in: kind, bytes, module and phase.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        mesh_dim: of the ranks that take part.
        phase: "forward", "backward" (a recomputed forward too) or "after backward".
        bytes: of the whole tensor that it sums, makes or divides.
        path: of the module that causes it.
        directive: that put it there.
    """

    kind: str
    mesh_dim: str
    phase: str
    bytes: int
    path: str = ""
    directive: str = ""


class Row(NamedTuple):
    """One thing that happens in a step.

    Args:
        op: an operator of torch, or what else happens: see the names above, and kinds of collectives.
        unit: that runs; "" between units.
        path: of the module that causes it, where that is known.
        reads: the tensors among the arguments.
        writes: the tensors among the results.
        changes: those of the arguments that are written in place.
        output: of a call of a unit, its result with a Ref for each tensor.
        product: matrix product that the operator is.
        backward: it happens in the backward.
        amount: a number that belongs to the row.
        transfer: the collective that it is.
    """

    op: Any
    unit: str = ""
    path: str = ""
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    changes: tuple[Ref, ...] = ()
    output: tuple[list[Any], TreeSpec] | None = None
    product: Product | None = None
    backward: bool = False
    amount: float = 0
    transfer: Transfer | None = None


@cache
def is_view(op: Any) -> bool:
    """Return whether an operator writes no memory."""
    infos = [returned.alias_info for returned in op._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


class _Done(Exception):  # noqa: N818 - not an error: the loss is known, so the forward may end
    pass


class Tape(TorchDispatchMode):
    """Records one step of a model; without a model it notes the collectives alone.

    Args:
        model: of fake tensors; None: whoever runs one tells it to note on this tape.
        units: paths of the modules whose calls count one by one; none lies within another.
        inner: paths of other modules whose calls begin and end with a row.
        last: unit after which the forward may end once a parallel loss is known.
    """

    def __init__(
        self, model: nn.Module | None = None, units: Collection[str] = (),
        inner: Collection[str] = (), last: str = "",
    ):  # fmt: skip
        super().__init__()
        self.rows: list[Row] = []
        self.losses: list[Tensor] = []
        self._unit, self._last, self._calls = "", last, 0
        self._tensors: Any = WeakIdKeyDictionary()
        self._storages: dict[int, int] = {}
        self._count = itertools.count()
        self._ends: list[Callable[[], Any]] = []
        if model is None:
            return
        for path in (*units, *inner):
            self._watch(model.get_submodule(path), path, path in units)
        for x in (*model.parameters(), *model.buffers()):
            self._given(x)
            if x.requires_grad:
                self._ends.append(x.register_post_accumulate_grad_hook(self._summed).remove)

    @property
    def transfers(self) -> list[Transfer]:
        """The collectives, in order."""
        return [row.transfer for row in self.rows if row.transfer is not None]

    def note(self, op: Any, **fields: Any) -> None:
        """Write a row."""
        backward = torch._C._current_graph_task_id() != -1
        self.rows.append(Row(op, self._unit, backward=backward, **fields))

    def listen(self, group: Any, mesh_dim: str, path: str, directive: object) -> Any:
        """The group, which notes here what it is asked for; a real group stays as it is."""
        if not isinstance(group, ShapeOnlyGroup):
            return group

        def note(kind: str, nbytes: int) -> None:
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            transfer = Transfer(kind, mesh_dim, phase, nbytes, path, str(directive))
            self.note(kind, path=path, amount=nbytes, transfer=transfer)

        return group._replace(note=note)

    def run(
        self, model: nn.Module, mode: Any, batch: Mapping[str, Any],
        loss_of: Callable[[Any], Tensor | None] = lambda output: None,
    ) -> "Tape":  # fmt: skip
        """Record a forward, and its backward where there is a loss; the tape is finished then.

        Args:
            model: that was given when the tape was made.
            mode: the FakeTensorMode of its tensors.
            batch: of any device; only shapes and dtypes count. No cache is filled, as in a training step.
            loss_of: the loss of an output, which is None where the forward ended early.
        """
        with mode:
            inputs = self._inputs(model, batch)
        try:
            with mode, self, torch.enable_grad():  # in an evaluation too: its plan serves training
                loss = self._forward(model, inputs, loss_of)
                self.note(LOSS)
                if loss is not None:
                    loss.backward()
                    del loss
        finally:
            self.close()
        return self

    def _inputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        fakes = {id(x): empty_like(x) for x in batch.values() if isinstance(x, Tensor)}
        for fake in fakes.values():
            self._given(fake)
        found = {name: fakes.get(id(x), x) for name, x in batch.items()}
        return {**found, **({"use_cache": False} if accepts(type(model), "use_cache") else {})}

    def _forward(self, model: nn.Module, inputs: Mapping[str, Any], loss_of: Callable) -> Any:
        try:
            return loss_of(model(**inputs))
        except _Done:
            pass  # what it holds is given up before the loss is made
        return loss_of(None)

    def sum_of(self, output: Any) -> Tensor | None:
        """One number that depends on the losses noted, and on all else that an output holds."""
        leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
        found = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        terms = [x.float().sum() for x in (*self.losses, *found)]
        return torch.stack(terms).sum() if terms else None

    def close(self) -> None:
        """Remove the hooks; what happens later is not noted."""
        while self._ends:
            self._ends.pop()()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and write its row."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        changes = self._refs(args[0]) if func._schema.is_mutable and args else ()
        product = product_of(func, args, kwargs, out)
        reads, writes = self._refs((args, kwargs)), self._refs(out)
        self.note(func, reads=reads, writes=writes, changes=changes, product=product)
        return out

    def _refs(self, tree: Any) -> tuple[Ref, ...]:
        return tuple(self._ref(x) for x in tree_leaves(tree) if isinstance(x, Tensor))

    def _ref(self, tensor: Tensor) -> Ref:
        number = self._tensors.get(tensor)
        if number is None:
            number = self._tensors[tensor] = next(self._count)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = next(self._count)
            self._ends.append(weakref.finalize(storage, self._free, key).detach)
        return Ref(number, self._storages[key], storage.nbytes(), tuple(tensor.shape),
                   tensor.dtype, tensor.requires_grad)  # fmt: skip

    def _given(self, tensor: Tensor) -> None:
        """Give a number to the memory of a tensor that exists before the step and outlives it, such as a parameter."""
        key = tensor.untyped_storage()._cdata
        self._storages.setdefault(key, -1 - len(self._storages))

    def _free(self, key: int) -> None:
        self.note(FREE, amount=self._storages.pop(key))

    def _watch(self, module: nn.Module, path: str, is_unit: bool) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            if is_unit:
                self._unit = path
            else:
                self.note(ENTER, path=path)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            leaves, spec = tree_flatten(output)
            found = [self._ref(x) if isinstance(x, Tensor) else x for x in leaves]
            writes = tuple(x for x in found if isinstance(x, Ref))
            whole = (found, spec) if is_unit else None
            self.note(
                LEAVE, path=path, reads=self._refs((args, kwargs)), writes=writes, output=whole
            )
            if is_unit:
                self._unit = ""
                self._unit_ended(path, leaves)

        self._ends.append(module.register_forward_pre_hook(enter).remove)
        self._ends.append(module.register_forward_hook(leave, with_kwargs=True).remove)

    def _unit_ended(self, path: str, leaves: list[Any]) -> None:
        arrives = lambda gradient, call=self._calls: self.note(GRADIENT, amount=call)  # noqa: E731
        for x in leaves:
            if isinstance(x, Tensor) and x.requires_grad:
                self._ends.append(x.register_hook(arrives).remove)
        self._calls += 1
        if path == self._last and self.losses:
            raise _Done

    def _summed(self, parameter: Tensor) -> None:
        """Note where the gradient of a parameter lies."""
        if parameter.grad is not None:
            self.note(SUMMED, reads=self._refs(parameter.grad))


def empty_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape on the CPU; under a FakeTensorMode it has no data."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
