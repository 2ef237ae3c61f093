"""Dry runs of a forward on fake tensors, also of one that looks at its data.

What follows from the inputs alone is then computed beside the fake tensors, so that the forward sees
it (lengths, masks of other media); a plan made so holds for these data only. Within a unit, where experts
are chosen, a module that looks at data counts as one whose output is like its input; a stage compares
what it really sends with that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.tape import Tape
from slapo_zoo.pipeline.dataflow import GUESS, Call, calls_of

DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
RANDOM = torch.Tag.nondeterministic_seeded


def dry_run(
    model: nn.Module, units: Sequence[str], fake: Any, batch: Mapping[str, Any]
) -> tuple[list[Call], bool]:
    """The calls of units in one forward of a fake model, in order; true: they hold for these data only.

    Args:
        model: scheduled on a mesh without processes, its parameters fake tensors of the mode `fake`.
        units: paths that count.
        fake: the FakeTensorMode.
        batch: tensors of the sizes that count, on any device; their data only where the forward looks at it.
    """
    try:
        return calls_of(Tape(model, units).run(model, fake, batch).rows), False
    except DEPENDS:
        pass  # once more, with the data
    looking = LookingTape(model, units)
    with refused(model):
        return calls_of(looking.run(model, fake, batch).rows), looking.looked


@contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Refuse in words a forward that cannot run without its data."""
    try:
        yield
    except DEPENDS as error:
        problem = f"the forward of {type(model).__name__} depends on data ({error})"
        hint = "use pp=1: what crosses a cut is found from shapes alone"
        raise ScheduleError("pipeline", "dry run", problem, hint) from None


class LookingTape(Tape):
    """Records a forward that looks at data.

    Args:
        model: as for `Tape`; the forwards of its units are changed until the end.
        units: as for `Tape`.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]):
        super().__init__(model, units)
        self.looked, self.guesses = False, 0
        self._known: Any = WeakIdKeyDictionary()
        for module in {m: None for unit in units for m in model.get_submodule(unit).modules()}:
            own = vars(module).get("forward")
            module.forward = self._or_alike(module)
            self._ends.append(partial(_give_back, module, own))

    def _inputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        inputs = super()._inputs(model, batch)
        for name, value in batch.items():
            if isinstance(value, Tensor):
                self._known[inputs[name]] = value.cpu()
        return inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run on fake tensors, and on data where all of it is known."""
        kwargs = kwargs or {}
        found = self._of_inputs(func, args, kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except DEPENDS:
            self.looked = True
            if func is torch.ops.aten.index.Tensor and isinstance(args[0], Tensor):
                numbers = self._numbers(args[1])
                return super().__torch_dispatch__(func, types, (args[0], numbers), kwargs)
            if found is None:
                raise
            out = tree_map(_as_fake, found)
        for fake, real in zip(tree_leaves(out), tree_leaves(found), strict=False):
            if isinstance(fake, Tensor) and isinstance(real, Tensor):
                self._known[fake] = real
        return out

    def _of_inputs(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result on data, or None where some of it is not known."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if RANDOM in func.tags or not all(x in self._known for x in tensors):
            return None
        args, kwargs = tree_map(
            lambda x: self._known[x] if isinstance(x, Tensor) else x, (args, kwargs)
        )
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _numbers(self, indices: Sequence[Any]) -> list[Any]:
        """Return the indices with numbers in place of boolean masks."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                if index not in self._known:
                    raise DynamicOutputShapeException(torch.ops.aten.index.Tensor)
                with unset_fake_temporarily():
                    count = int(self._known[index].count_nonzero())
                found += [torch.empty(count, dtype=torch.long) for _ in range(index.ndim)]
            else:
                found.append(index)
        return found

    def _or_alike(self, module: nn.Module) -> Callable[..., Any]:
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


def _give_back(module: nn.Module, forward: Any) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


def _first_float(tree: Any) -> Tensor | None:
    found = (x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point())
    return next(found, None)


def _as_fake(found: Any) -> Any:
    """Return a fake tensor of the same size and dtype, which may be mixed with other fake tensors."""
    if not isinstance(found, Tensor):
        return found
    return torch.empty(tuple(found.shape), dtype=found.dtype)
