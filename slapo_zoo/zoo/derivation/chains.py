"""Detection of feed-forwards: linears whose outputs pass only element-wise operations before one other linear.

Such linears can be column-parallel and the last one row-parallel, with one all-reduce (arXiv:1909.08053, 3).
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "pow", "neg", "exp", "erf", "tanh", "sigmoid", "square",
    "sqrt", "clamp", "relu", "relu_", "relu6", "gelu", "silu", "mish", "elu", "selu", "softplus", "leaky_relu",
    "hardswish", "hardsigmoid", "hardtanh", "threshold", "dropout", "float", "to", "type", "type_as",
    "contiguous", "add_", "mul_",
    "__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__rsub__", "__truediv__", "__pow__", "__neg__",
}  # fmt: skip
LOOKS = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "stride", "detach"}  # fmt: skip


@dataclass
class Chains:
    """Record of one forward: which linears' output columns reach other linears and dropouts, unchanged or through
    element-wise operations alone, and which reach an operation that is not element-wise.

    Args:
        feeds: path of a linear --> paths of the linears whose output columns reached its input.
        takers: the same by sender: path of a linear --> paths of the linears whose input its output columns reached.
        mixed: paths of the linears whose output columns reached an operation that is not element-wise.
        dropouts: path of a dropout --> paths of the linears whose output columns reached its input.
    """

    feeds: dict[str, set[str]] = field(default_factory=dict)
    takers: dict[str, set[str]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    dropouts: dict[str, set[str]] = field(default_factory=dict)
    _held: Any = field(default_factory=WeakIdKeyDictionary)

    def enter(self, path: str, module: nn.Module, linear: bool, args: Any) -> None:
        """Record, before the linear or dropout `module` at `path` is called with `args`, which linears' output columns
        these tensors hold (noted by `leave` and `call`). `linear` is True for a linear. Other modules are ignored.
        """
        held = self._columns(args)
        if linear:
            self.feeds.setdefault(path, set()).update(held)
            for name in held:
                self.takers.setdefault(name, set()).add(path)
        elif isinstance(module, nn.Dropout) and held:
            self.dropouts.setdefault(path, set()).update(held)

    def leave(self, path: str, output: Any) -> None:
        """Record, after a call of the linear at `path`, that `output`, if a tensor, holds all of that linear's output columns."""
        if isinstance(output, Tensor):
            self._held[output] = {path}

    def call(self, name: str, args: Any, kwargs: Any, out: Any, draws: bool) -> None:
        """Record that the torch function `name` returned `out`. If it is element-wise, `out` holds the same linears'
        output columns as its arguments; if not, or if it draws random numbers (`draws`), tp cannot shard them.
        """
        held = self._columns((args, kwargs))
        if not held or name in LOOKS:
            return
        alike = isinstance(out, Tensor) and all(_fits(x, out) for x in tree_leaves((args, kwargs)))
        whole = [
            x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x not in self._held
        ]
        if name in ELEMENTWISE and alike and not draws and all(_has_one_column(x) for x in whole):
            self._held[out] = held
        else:
            self.mixed |= held

    def _columns(self, tree: Any) -> set[str]:
        found = [self._held.get(x, ()) for x in tree_leaves(tree) if isinstance(x, Tensor)]
        return set().union(*found)

    def found(self) -> dict[str, list[str]]:
        """Return {path of a linear that can be row-parallel: paths of linears whose output only it reads}."""
        return {
            taker: sorted(names)
            for taker, names in self.feeds.items()
            if names
            and all(self.takers[name] == {taker} and name not in self.mixed for name in names)
        }


def _fits(x: Any, out: Tensor) -> bool:
    return not isinstance(x, Tensor) or _has_one_column(x) or x.shape[-1] == out.shape[-1]


def _has_one_column(x: Tensor) -> bool:
    """Return whether all columns of a tensor share one value: the tensor is a scalar, or its last axis has size 1."""
    return not x.ndim or x.shape[-1] == 1
