"""Logits whose vocabulary axis is sharded over tp; their cross-entropy gathers nothing.

The unmodified loss code of `transformers` runs on them: `view(-1, V)`, slices, casts, scales, caps and constant
biases act on the local columns, `cross_entropy` is vocabulary-parallel, and any other operation gathers first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from slapo_zoo.kernels.loss.lm_loss import lm_loss, own_columns
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.mesh import ShapeOnlyGroup

_ELEMENTWISE = {
    torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16,
    torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.clone,
    torch.Tensor.detach, torch.Tensor.tanh, torch.tanh,
}  # fmt: skip
_WITH_ANOTHER = {  # functions of logits and a number, or a tensor without a gradient
    getattr(where, name)
    for where, names in (
        (torch, ("add", "sub", "mul", "div")),
        (torch.Tensor, ("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__")),
    )
    for name in names
}  # fmt: skip
_TENSOR: Any = torch.Tensor  # its attributes are descriptors, which type checkers do not know
_SHAPE = _TENSOR.shape.__get__
_ATTRIBUTES = {
    _TENSOR.dtype.__get__, _TENSOR.device.__get__, _TENSOR.requires_grad.__get__,
    _TENSOR.grad_fn.__get__, _TENSOR.is_cuda.__get__, _TENSOR.ndim.__get__,
    torch.Tensor.dim, torch.Tensor.is_floating_point,
}  # fmt: skip


class VocabLogits(torch.Tensor):
    """Tensor subclass that holds this rank's columns [..., ceil(V / n)] and behaves as the logits [..., V].

    The vocabulary is sharded over n ranks. Padding columns come last; `gathered` removes them, the loss ignores them.
    """

    vocab_size: int
    group: Any

    @staticmethod
    def wrap(local: Tensor, vocab_size: int, group: Any) -> Tensor:
        """Return this rank's columns `local` as VocabLogits of `vocab_size` classes; unchanged if `group` is None."""
        if group is None:
            return local
        if isinstance(group, ShapeOnlyGroup):  # a dry run has no data to keep apart
            return local.new_empty(()).expand(*local.shape[:-1], vocab_size)  # and takes no memory
        logits = local.as_subclass(VocabLogits)
        logits.vocab_size, logits.group = vocab_size, group
        return logits

    def local(self) -> Tensor:
        """Return this rank's columns of the logits, with the padding, as a plain tensor in the same autograd graph."""
        return self.as_subclass(torch.Tensor)

    def gathered(self) -> Tensor:
        """All-gather the columns of all ranks, which call this together; return logits [..., V] as a plain tensor."""
        full = collectives.all_gather(self.local(), -1, self.group, sharded_gradient=False)
        return full.narrow(-1, 0, self.vocab_size)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on the local columns where that gives the same result, else on gathered logits."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            x = args[0] if args else None
            if isinstance(x, VocabLogits):
                if func in _ATTRIBUTES:
                    return func(*args, **kwargs)
                if func is _SHAPE or func is torch.Tensor.size:
                    shape = torch.Size((*_SHAPE(x)[:-1], x.vocab_size))
                    axis = args[1] if len(args) > 1 else kwargs.get("dim")
                    return shape if axis is None else shape[axis]
                if local := _on_local(func, x, args[1:], kwargs):
                    return VocabLogits.wrap(local[0], x.vocab_size, x.group)
                if func is functional.cross_entropy and _supported(x, *args[1:], **kwargs):
                    return _cross_entropy(x, *args[1:], **kwargs)
            args, kwargs = tree_map_only(VocabLogits, VocabLogits.gathered, (args, kwargs))
            return func(*args, **kwargs)


def _on_local(func: Any, x: VocabLogits, rest: tuple, kwargs: dict) -> tuple[Tensor] | None:
    """Return the tuple (func(local, *rest, **kwargs),), where `local` is this rank's columns of x as a plain tensor;
    None if `func` is no cast, view, slice or elementwise operation and so needs the columns of all ranks.
    """
    local = x.local()
    if func in _ELEMENTWISE:
        return (func(local, *rest, **kwargs),)
    if func in _WITH_ANOTHER and len(rest) == 1 and not kwargs:
        other = _local_operand(x, rest[0])
        return None if other is None else (func(local, other),)
    if (sizes := sizes_before(x.vocab_size, func, rest, kwargs)) is not None:
        return (func(local, (*sizes, local.shape[-1])),)
    if func is torch.Tensor.__getitem__ and keeps_last_axis(rest[0], local.ndim):
        return (func(local, *rest),)
    return None


def _local_operand(x: VocabLogits, other: Any) -> Any:
    """Return the other operand of an element-wise operation on logits [..., V], sliced to the local columns; None if
    the logits must be gathered.

    A tensor with a gradient needs gathered logits: on local columns its gradient would be incomplete.
    """
    if isinstance(other, int | float):
        return other
    if isinstance(other, VocabLogits):
        return other.local() if other.vocab_size == x.vocab_size else None
    if not isinstance(other, Tensor) or other.requires_grad:
        return None
    if other.ndim == 0 or other.shape[-1] == 1:
        return other
    if other.shape[-1] != x.vocab_size:
        return None
    start, stop = own_columns(x.vocab_size, x.group)
    return functional.pad(other[..., start:stop], (0, _SHAPE(x)[-1] - (stop - start)))


def sizes_before(last: int, func: Any, rest: tuple, kwargs: dict) -> tuple[int, ...] | None:
    """Return the sizes before the last if `func`, called with `rest` after the tensor, is view or reshape to sizes of
    which the last is `last`; None for any other call.
    """
    if func not in (torch.Tensor.view, torch.Tensor.reshape) or not rest or kwargs:
        return None
    sizes = tuple(rest[0]) if isinstance(rest[0], tuple | list) else rest
    fits = all(isinstance(s, int) for s in sizes) and sizes[-1:] == (last,)
    return sizes[:-1] if fits else None


def keeps_last_axis(index: Any, ndim: int) -> bool:
    """Return whether indexing a tensor of `ndim` axes by `index` keeps the last axis, complete and in last place."""
    index = index if isinstance(index, tuple) else (index,)
    if not index or index[-1] is Ellipsis or index[-1] == slice(None):
        return True
    if any(i is Ellipsis for i in index):
        return False
    consumed = sum(i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1
                   for i in index if i is not None)  # fmt: skip
    return consumed < ndim


def _supported(x: VocabLogits, target: Tensor, weight: Any = None, *_: Any, **kwargs: Any) -> bool:
    """Return whether the vocabulary-parallel loss can replace a call of cross_entropy: class indices, no class weights."""
    return x.dim() == 2 and target.dtype == torch.int64 and weight is None


def _cross_entropy(
    x: VocabLogits, target: Tensor, weight: None = None, size_average: None = None, ignore_index: int = -100,
    reduce: None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute torch.nn.functional.cross_entropy (same signature) of logits that are sharded over the vocabulary."""
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    whole: Any = {"vocab_size": x.vocab_size, "group": x.group}
    return lm_loss(x.local(), None, target, reduction=reduction, **options, **whole).to(x.dtype)
