"""Dry run of a forward on fake tensors, which finds the tensors that pass between its blocks, embeddings and heads.

If the forward branches on values that follow from its inputs alone (lengths, masks), these are also computed on the
user's batch; the result is reused for batches with equal values. A module inside a unit (block, embedding, head) that
branches on hidden states (experts) is assumed to return a tensor like its input; a stage raises an error if it does
not.

Virtual ranks (threads) and later models with the same class, config, mesh sizes and changes to modules share a dry run.
"""

import json
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import ScheduleError
from slapo_zoo.hf.configs import config_key
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.language.tape import Tape
from slapo_zoo.pipeline.data_reads import DataReads, Operation, copied, count_marked, facts_of
from slapo_zoo.pipeline.dataflow import GUESS, Call, calls_of
from slapo_zoo.pipeline.unit_costs import restore_forward, skip_repeated

DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
RANDOM = torch.Tag.nondeterministic_seeded
KEPT = 64  # number of dry runs that are cached, the newest ones
OF_SHAPES = ("tokens", "parameters")  # mesh dims whose ranks may hold shards of different shapes
Found: TypeAlias = tuple[list[Call], DataReads]
_calls: dict[Any, Found] = {}
_turn = threading.Lock()


def dry_run(model: nn.Module, units: Sequence[str], fake: Any, batch: Mapping[str, Any]) -> Found:
    """Return the pair (list with a Call for each call of a module in `units` during a forward of the fake model,
    DataReads: data of `batch` that this forward read). It holds for any batch with the same shapes and such data.

    Args:
        model: model with fake parameters, scheduled on a mesh without processes.
        units: paths of the modules whose calls are recorded.
        fake: the FakeTensorMode of the parameters.
        batch: arguments of the forward on any device; their data are read only if the forward branches on them.
    """
    tape = Tape(model, units)
    skip_repeated(tape, model, units, repeat_rows=False)
    try:
        return calls_of(tape.run(model, fake, batch, tape.note_output).rows), DataReads()
    except DEPENDS:
        pass  # try again below, with the data
    tape = DataTape(model, units)
    with refused(model):
        return calls_of(tape.run(model, fake, batch, tape.note_output).rows), tape.reads.needed()


@contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Context that turns torch's error about a data-dependent forward of `model` into a ScheduleError."""
    try:
        yield
    except DEPENDS as error:
        problem = f"the forward of {type(model).__name__} depends on data ({error})"
        hint = "use pp=1: a pipeline needs tensors between stages that shapes alone determine"
        raise ScheduleError("pipeline", "dry run", problem, hint) from None


class DataTape(Tape):
    """Recorder of a fake forward that branches on data: tensors that follow from the batch alone have real data too.

    Args:
        model: model with fake parameters. A module in `units` that branches on a tensor without real data returns a
            copy of its input instead; a real step checks the shapes that were assumed so.
        units: paths of the modules whose calls are recorded.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]):
        super().__init__(model, units)
        self.reads, self.guesses = DataReads(), 0
        self._known: Any = WeakIdKeyDictionary()
        for module in {m: None for unit in units for m in model.get_submodule(unit).modules()}:
            own = vars(module).get("forward")
            module.forward = self._or_like_input(module)
            self.on_close(partial(restore_forward, module, own))

    def _inputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        inputs = super()._inputs(model, batch)
        for name, value in batch.items():
            if isinstance(value, Tensor):
                self._known[inputs[name]] = copied(value)
                self.reads.inputs[name] = inputs[name]
        return inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record `func` on fake tensors, and also on real data if all its tensor arguments have real data."""
        kwargs, facts = kwargs or {}, None
        found = self._on_real_data(func, args, kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except DEPENDS:
            if func is torch.ops.aten.index.Tensor and isinstance(args[0], Tensor):
                numbers = self._without_masks(args[1])
                return super().__torch_dispatch__(func, types, (args[0], numbers), kwargs)
            if found is None:
                raise
            out, facts = tree_map(_as_fake, found), facts_of(found)
        if found is not None:
            self.reads.operations.append(Operation(func, args, kwargs, out, facts))
        for fake, real in zip(tree_leaves(out), tree_leaves(found), strict=False):
            if isinstance(fake, Tensor) and isinstance(real, Tensor):
                self._known[fake] = real
        return out

    def _on_real_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return `func`'s result on the real tensors, computed from the user's batch, that belong to its fake
        arguments. None if an argument has none (it depends on parameters) or `func` draws random numbers.
        """
        known = lambda x: self._known.get(x, None if isinstance(x, FakeTensor) else x)  # noqa: E731
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if RANDOM in func.tags or any(known(x) is None for x in tensors):
            return None
        args, kwargs = tree_map(lambda x: known(x) if isinstance(x, Tensor) else x, (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """Return an indexing operator's `indices`, with boolean masks as fake integer indices, one per True element."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                if index not in self._known:
                    raise DynamicOutputShapeException(torch.ops.aten.index.Tensor)
                with unset_fake_temporarily():
                    count = count_marked(self._known[index])
                self.reads.operations.append(Operation(count_marked, (index,), {}, None, [count]))
                found += [torch.empty(count, dtype=torch.long) for _ in range(index.ndim)]
            else:
                found.append(index)
        return found

    def _or_like_input(self, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            before = self.guesses
            try:
                return original(*args, **kwargs)
            except Exception as error:
                like = _first_float((args, kwargs))
                mine = isinstance(error, DEPENDS) or self.guesses > before
                if like is None or not mine:
                    raise
                self.guesses += 1
                self.note(GUESS)
                own = next(module.parameters(), None)
                return (
                    like * 1 if own is None else like + 0 * own.flatten()[:1].sum().to(like.dtype)
                )

        return forward


def _first_float(tree: Any) -> Tensor | None:
    found = (x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point())
    return next(found, None)


def _as_fake(found: Any) -> Any:
    """Return a fake tensor of the shape and dtype of the tensor `found`; return other values unchanged."""
    if not isinstance(found, Tensor):
        return found
    return torch.empty(tuple(found.shape), dtype=found.dtype)


def shared_calls(
    program: Any, shapes: Any, batch: Mapping[str, Any], run: Callable[[], Found]
) -> Found:
    """Return the result of a dry run: the cached one for `program` and `shapes` if it holds for `batch`, else `run()`.

    Args:
        program: key of the model, from `program_of`; None always calls `run`.
        shapes: key of the batch: its shapes and dtypes.
        batch: arguments of the forward.
        run: makes a dry run; returns (calls of units, DataReads: data of its batch that the forward read).
    """
    with _turn:  # ranks that are threads wait for the first
        known = _calls.get((program, shapes))
        if program is not None and known is not None and known[1].hold(batch):
            return known
        found = run()
        if program is not None:
            _calls[program, shapes] = found
            while len(_calls) > KEPT:
                del _calls[next(iter(_calls))]
        return found


def program_of(
    schedule: Schedule, cls: Any, units: Sequence[str], leave_out: Collection[str]
) -> Any:
    """Return a cache key for dry runs: class, config, mesh sizes, and the changes (directives) recorded in `schedule`;
    None if a change holds an object that JSON cannot hold, such as a function.

    Args:
        schedule: this rank's model, its mesh and the recorded changes to its modules.
        cls: class of the model.
        units: paths of the modules whose calls are recorded.
        leave_out: names of the kinds of change, e.g. "checkpoint", that a dry run leaves out.
    """
    steps = [step for step in schedule.history if step[1].name not in leave_out]
    if any(directive.local() for _, directive in steps):
        return None
    try:
        written = json.dumps([[pattern, type(d).name, d.arguments()] for pattern, d in steps])
    except TypeError:  # a user's directive may hold any object
        return None
    mesh, state = schedule.mesh, schedule.state
    sizes = [(dim.name, mesh.size(dim.name), mesh.coord(dim.name) if dim.divides in OF_SHAPES else 0)
             for dim in mesh.DIMS]  # fmt: skip
    return (
        cls, _source(cls), tuple(units), config_key(schedule.model.config), written, tuple(sizes),
        state.compute_dtype, str(state.positions),
    )  # fmt: skip


def _source(cls: Any) -> tuple[Any, ...]:
    """Return weak references to the functions, classes and forwards in the Python module of the model class `cls`. They
    are a part of the cache key of a dry run, which thus changes when a user replaces one of them.
    """
    parts = [part for part in vars(sys.modules[cls.__module__]).values() if isinstance(part, FunctionType | type)]  # fmt: skip
    forwards = (getattr(part, "forward", None) for part in parts)
    return tuple(map(weakref.ref, [*parts, *(each for each in forwards if each is not None)]))
