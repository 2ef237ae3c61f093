"""Which values one part of a model makes and another part uses, found by a rehearsal.

The scheduled model runs once on fake tensors: shapes without data. Every call of a *unit* (a block, an
embedding, a norm, a head) is recorded: what it returned, and the outputs of which earlier calls its
arguments were computed from. From this follows what crosses a pipeline cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
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
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor to receive into."""
        grad = self.requires_grad and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=grad)

    def stand_in(self, device: torch.device) -> Tensor:
        """Zeros that take no memory, for a value that nothing on this stage uses."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of a unit: its path, its output (tensors as Shapes), and what it was made from."""

    unit: str
    spec: TreeSpec
    leaves: tuple[Any, ...]
    needs: frozenset[Value]

    def output(self, tensors: Mapping[int, Tensor], device: torch.device) -> Any:
        """The output with the given tensors, and stand-ins for all others."""
        leaves = [
            tensors.get(i, leaf.stand_in(device)) if isinstance(leaf, Shape) else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        return tree_unflatten(leaves, self.spec)


class Rehearsal(TorchDispatchMode):
    """Records the calls of units while a model runs on fake tensors."""

    def __init__(self, model: nn.Module, units: Sequence[str]):
        super().__init__()
        self.calls: list[Call] = []
        self._origin: Any = WeakIdKeyDictionary()
        self._hooks = []
        for unit in units:
            module = model.get_submodule(unit)
            self._hooks.append(module.register_forward_hook(self._after(unit), with_kwargs=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every output of an operation comes from wherever its inputs came from."""
        out = func(*args, **(kwargs or {}))
        origin = self._origins((args, kwargs))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._origin[tensor] = self._origin.get(tensor, frozenset()) | origin
        return out

    def _origins(self, tree: Any) -> frozenset[Value]:
        found = [self._origin.get(x) for x in tree_leaves(tree) if isinstance(x, Tensor)]
        return frozenset().union(*(f for f in found if f))

    def _after(self, unit: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
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


def rehearse(
    model: nn.Module, units: Sequence[str], fake: Any, batch: Mapping[str, Any],
    finish: Callable[[Any], None] | None = None,
) -> list[Call]:  # fmt: skip
    """The calls of units in one forward of a fake model, in order.

    Args:
        model: scheduled on a rehearsing mesh, its parameters fake tensors of the mode `fake`.
        units: paths that count.
        fake: the FakeTensorMode.
        batch: real tensors of the sizes to rehearse.
        finish: called with the output of the model, still on fake tensors.
    """
    inputs = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in batch.items()}
    rehearsal = Rehearsal(model, units)
    try:
        with fake, rehearsal, torch.enable_grad():  # the plan serves training too
            output = model(**inputs)
            if finish is not None:
                finish(output)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        problem = f"the forward of {type(model).__name__} depends on data ({error})"
        hint = "use pp=1: what crosses a cut is found from shapes alone"
        raise ScheduleError("pipeline", "rehearsal", problem, hint) from None
    finally:
        rehearsal.close()
    return rehearsal.calls
