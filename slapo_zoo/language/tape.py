"""Tape: record one training step of a model on fake tensors, one row per operator, collective or module call.

The planner, the pipeline cuts, `explain` and the memory estimate all read these rows, so none of them has hooks
or a dispatch mode of its own. Collectives are recorded where they are called, so recomputation, the
vocabulary-parallel loss and third-party operators are counted as they really run.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.hf.models import empty_like, like, swap_tensors
from slapo_zoo.parallel.mesh import Mesh, ShapeOnlyGroup
from slapo_zoo.parallel.token_cut import TokenCut


class Product(NamedTuple):
    """Sizes and cost of a batch of matrix products [m, k] x [k, n], or of a fused attention (n = 0).

    Args:
        batch: number of products; for an attention, batch size times heads.
        m: rows of the first matrix; for an attention, queries.
        n: columns of the second matrix; 0 for a fused attention.
        k: length of the summed axis; for an attention, keys.
        flops: floating-point operations of the whole batch.
        moved: bytes read and written by the whole batch.
    """

    batch: float
    m: float
    n: float
    k: float
    flops: float
    moved: float


def product_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Product | None:
    """Return sizes and cost of the matrix product, convolution or attention of an operator call; None for others.

    Args:
        func: the torch operator, e.g. `aten.mm.default`.
        args: positional arguments of the call, fake tensors.
        kwargs: keyword arguments of the call.
        out: result of the call.
    """
    packet = func._overloadpacket
    is_attention = "scaled_dot_product" in str(packet)
    if packet not in flop_registry and not is_attention:
        return None
    tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
    moved = float(sum(t.numel() * t.itemsize for t in tensors))
    if is_attention:
        back = "backward" in str(packet)
        query, key = args[1 if back else 0], args[2 if back else 1]
        flops = (10.0 if back else 4.0) * query.numel() * key.shape[-2]
        batch = math.prod(query.shape[:-2])
        return Product(batch, query.shape[-2], 0, key.shape[-2], flops, moved)
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    found = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
    if found.ndim == 3:
        batch, m, n = found.shape
    else:  # a convolution: one row per output position
        batch, n = 1, found.shape[1] if found.ndim > 1 else 1
        m = found.numel() / max(n, 1)
    k = flops / (2.0 * batch * m * n) if flops else 0.0
    return Product(batch, m, n, k, flops, moved)


# Values of Row.op besides operators of torch and kinds of collectives:
ENTER, LEAVE = "enter", "leave"  # begin and end of a watched call (begin: not of units)
LOSS = "loss"  # the forward has ended, the backward begins
GRADIENT = "gradient"  # first gradient of an output of unit call `amount`
SUMMED = "summed"  # a parameter's gradient was accumulated in `.grad`
FREE = "free"  # storage number `amount` was freed


class Ref(NamedTuple):
    """Description of a tensor that a `Row` of a Tape (operator, collective or module call of a step) reads or writes.

    Args:
        number: number of the tensor, the same in all rows; the result of an in-place operator has that of its input.
        storage: number of the memory that all views of a tensor share; negative if allocated before the step (weights).
        size: bytes of this memory, which can be more than the tensor's own.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        requires_grad: the tensor's `requires_grad`, but False in rows of operators, which run below autograd.
    """

    number: int
    storage: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor's elements; the memory that a view shares may have more (`size`)."""
        return math.prod(self.shape) * self.dtype.itemsize


class Transfer(NamedTuple):
    """One collective in which this rank takes part during a training step.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        mesh_dim: mesh dim of the ranks that take part.
        phase: "forward", "backward" (includes a recomputed forward) or "after backward".
        bytes: size of the unsharded tensor that is reduced, gathered or scattered.
        path: path of the module that causes the collective; '' if no module does.
        directive: the change of the schedule that inserted the collective, as text.
    """

    kind: str
    mesh_dim: str
    phase: str
    bytes: int
    path: str = ""
    directive: str = ""


class Row(NamedTuple):
    """One event of a recorded step: an operator, a collective, or the begin or end of a module call.

    Args:
        op: the torch operator, the kind of a collective, or an event: ENTER, LEAVE (a module call), LOSS (the backward
            begins), GRADIENT (of a unit's output), SUMMED (in a parameter's `.grad`), FREE (of memory), "output".
        unit: path of the watched unit (e.g. a block) that runs; '' between units.
        path: path of the module that causes the event, where that is known.
        reads: tensors among the arguments.
        writes: tensors among the results.
        changes: arguments that are written in place.
        output: result of a unit's call, flattened, with a Ref in place of each tensor.
        product: the matrix product or attention that the operator computes, or None.
        backward: True when the event happens during the backward.
        amount: of a collective its bytes, of FREE the `Ref.storage`, of GRADIENT the index of the unit's call; else 0.
        transfer: the collective, or None for any other event.
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
    """Return whether an operator returns only views of its arguments, so that it allocates no memory."""
    infos = [returned.alias_info for returned in op._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


class _Done(Exception):  # noqa: N818 - not an error: the loss is known, so the forward may end
    pass


class Tape(TorchDispatchMode):
    """Recorder of a training step of a model on fake tensors, as a list `rows` of events (`Row`).

    Args:
        model: model with fake tensors; None when the caller runs the forward itself: only collectives are recorded.
        units: paths of modules, e.g. blocks, no two within each other; each Row names the unit that runs.
        inner: paths of further modules; each begin and end of their calls is a Row, too.
        last: path of a unit after which `run` ends the forward, if a loss was computed by then, and runs the backward.
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
        for module in model.modules():
            module._apply = partial(self._converted, module)
            self._ends.append(partial(delattr, module, "_apply"))
        for path in (*units, *inner):
            self._watch(model.get_submodule(path), path, path in units)
        for x in (*model.parameters(), *model.buffers()):
            self._given(x)
            if x.requires_grad:
                self._ends.append(x.register_post_accumulate_grad_hook(self._summed).remove)

    @property
    def transfers(self) -> list[Transfer]:
        """Return the recorded collectives of the step, in order."""
        return [row.transfer for row in self.rows if row.transfer is not None]

    def note(self, op: Any, **fields: Any) -> None:
        """Append a `Row` with operator or event `op` and the Row's `fields`; `unit` and `backward` are filled in."""
        backward = torch._C._current_graph_task_id() != -1
        self.rows.append(Row(op, self._unit, backward=backward, **fields))

    def note_output(self, output: Any) -> None:
        """Append a Row that reads all tensors of `output`; return None: `run(loss_of=note_output)` has no backward."""
        self.note("output", reads=self._refs(output))

    def listen(self, group: Any, mesh_dim: str, path: str, directive: object) -> Any:
        """Return a copy of `group` that records each collective over the group on this tape.

        Args:
            group: a ShapeOnlyGroup (of a dry run, without processes); a real process group is returned unchanged.
            mesh_dim: mesh dim of the group.
            path: module that will be named as the cause.
            directive: directive that will be named as the cause.
        """
        if not isinstance(group, ShapeOnlyGroup):
            return group

        def note(kind: str, nbytes: int) -> None:
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            transfer = Transfer(kind, mesh_dim, phase, nbytes, path, str(directive))
            self.note(kind, path=path, amount=nbytes, transfer=transfer)

        return group._replace(note=note)

    def cut_of(self, mesh: Mesh, way: str) -> TokenCut | None:
        """Return how tokens are sharded over cp on `mesh`, with collectives that this tape records; None when cp is 1.
        `way` names how attention reaches the tokens of other ranks: "gather", "ulysses" or "ring".
        """
        cut = TokenCut.of(mesh, way)
        return cut and replace(cut, group=self.listen(cut.group, "cp", "", "cp"))

    def run(
        self, model: nn.Module, mode: Any, batch: Mapping[str, Any],
        loss_of: Callable[[Any], Tensor | None] = lambda output: None,
    ) -> "Tape":  # fmt: skip
        """Record a forward, and a backward when `loss_of` returns a loss; then remove all hooks and return the tape.

        Args:
            model: the model that was passed to the constructor.
            mode: the FakeTensorMode of the model's tensors.
            batch: keyword arguments of the forward, of which only shapes and dtypes count; no KV cache is filled.
            loss_of: maps the model's output to the loss or None; its argument is None where the forward stopped early.
        """
        with mode:
            inputs = self._inputs(model, batch)
        try:
            with mode, self, torch.enable_grad():  # also in an evaluation: training uses the plan
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
            pass  # drop the exception's references before the loss
        return loss_of(None)

    def sum_of(self, output: Any) -> Tensor | None:
        """Return the sum of `self.losses` and all elements of tensors in `output` that require grad; None if none."""
        leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
        found = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        terms = [x.float().sum() for x in (*self.losses, *found)]
        return torch.stack(terms).sum() if terms else None

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Register `undo` to be called by `close`; functions run in reverse order of registration."""
        self._ends.append(undo)

    def close(self) -> None:
        """Remove all hooks from the model; later events are not recorded."""
        while self._ends:
            self._ends.pop()()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator `func` on fake tensors, append a `Row` of the call to the tape, and return the result."""
        if func is torch.ops.prim.device.default:  # two of three calls: autograd asks, nothing runs
            self.note(func, reads=(self._ref(args[0]),))
            return args[0].device
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
        """Give the memory of a tensor from before the step, e.g. a parameter, a negative number (for `Ref.storage`)."""
        key = tensor.untyped_storage()._cdata
        self._storages.setdefault(key, -1 - len(self._storages))

    def _free(self, key: int) -> None:
        self.note(FREE, amount=self._storages.pop(key))

    def _converted(self, module: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
        """Stand for `Module._apply`, e.g. of a router that a forward moves to fp32: torch converts no fake tensors."""
        new = lambda x: x if (found := fn(x)) is x else like(x, found.detach())  # noqa: E731
        self._ends.append(swap_tensors(module.modules(), new))
        return module

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
            reads = self._refs((args, kwargs))
            self.note(LEAVE, path=path, reads=reads, writes=writes, output=whole)
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
        """Append a Row that reads `parameter.grad`, with op SUMMED; autograd calls this hook after each addition."""
        if parameter.grad is not None:
            self.note(SUMMED, reads=self._refs(parameter.grad))
