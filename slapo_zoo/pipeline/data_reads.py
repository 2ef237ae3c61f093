"""Values (e.g. a length) that a forward's Python code reads from the data of its inputs, recorded in a dry run.

The result of a dry run (a forward on fake tensors) is valid for every batch that gives the same values. To check
another batch, the few operators that compute the values from the inputs are run, instead of a new dry run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map


class Operation(NamedTuple):
    """One operator call of a dry run whose arguments depend on inputs of the forward only, not on parameters.

    Args:
        func: the torch operator, or `count_marked`, which counts the True elements of a mask that is used as an index.
        args: positional arguments of the operator, with fake tensors.
        kwargs: keyword arguments of the operator, with fake tensors.
        out: result of the operator, with fake tensors.
        facts: `facts_of` (shapes and numbers) of its result on the user's batch, if fake tensors could not tell them;
            another batch must give the same facts to reuse the dry run. Otherwise None.
    """

    func: Any
    args: Any
    kwargs: Any
    out: Any
    facts: list[Any] | None


class DataReads:
    """Operators of a dry run that compute from a batch what the forward branches on, e.g. the longest row of a mask.

    Attributes:
        inputs: name of an input --> its fake tensor in the dry run.
        operations: operators in the order in which they ran; the values that were read are the `facts` of some of them.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.operations: list[Operation] = []

    def __bool__(self) -> bool:
        """Return whether the recorded forward read a value from the data of its inputs."""
        return any(each.facts is not None for each in self.operations)

    def needed(self) -> "DataReads":
        """Return a copy with only the operators that write in place or lead to a value that the forward read."""
        found, used = DataReads(), set()
        for each in reversed(self.operations):
            in_place = isinstance(each.func, OpOverload) and each.func._schema.is_mutable
            if each.facts is not None or in_place or used & _ids(each.out):
                found.operations.insert(0, each)
                used |= _ids((each.args, each.kwargs))
        found.inputs = {name: x for name, x in self.inputs.items() if id(x) in used}
        return found if found else DataReads()

    def hold(self, batch: Mapping[str, Any]) -> bool:
        """Run the recorded operators on `batch` (name --> input); return whether they give the dry run's values."""
        real = {id(x): copied(batch[name]) for name, x in self.inputs.items()}
        for func, args, kwargs, out, facts in self.operations:
            args, kwargs = tree_map(
                lambda x: real.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs)
            )
            found = func(*args, **kwargs)
            if facts is not None and facts_of(found) != facts:
                return False
            for fake, value in zip(tree_leaves(out), tree_leaves(found), strict=False):
                real[id(fake)] = value
        return True


def _ids(tree: Any) -> set[int]:
    return {id(x) for x in tree_leaves(tree) if isinstance(x, Tensor)}


def copied(value: Tensor) -> Tensor:
    """Return a real copy of `value`, on the CPU, even under FakeTensorMode; operators may write into the copy."""
    with unset_fake_temporarily():
        return value.detach().to("cpu", copy=True)


def facts_of(found: Any) -> list[Any]:
    """Return the operator result `found` flattened in pytree order, with the shape in place of each tensor."""
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in tree_leaves(found)]


def count_marked(mask: Tensor) -> int:
    """Return how many elements of a boolean mask are True."""
    return int(mask.count_nonzero())
