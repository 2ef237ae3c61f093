"""Logits whose vocabulary axis is sharded over tp, and the cross-entropy that needs no gather.

The unmodified loss code of `transformers` runs on them: `view(-1, V)`, slices, casts, scales, caps and
constant biases act on the local columns, `cross_entropy` runs in parallel, and every other operation gathers first.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.local_tensors import require_indices
from slapo_zoo.parallel.mesh import ShapeOnlyGroup
from slapo_zoo.parallel.once import once
from slapo_zoo.parallel.placement import Placement

_ELEMENTWISE = {
    torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16,
    torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.clone,
    torch.Tensor.detach, torch.Tensor.tanh, torch.tanh,
}  # fmt: skip
_WITH_ANOTHER = {  # that is a number, or a tensor without a gradient
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
    """Local columns [..., ceil(V / n)] that behave as logits [..., V].

    Only the last rank's columns can be padding; `gathered` removes it, and it never enters the loss.
    """

    vocab_size: int
    group: Any

    @staticmethod
    def wrap(local: Tensor, vocab_size: int, group: Any) -> Tensor:
        """Wrap this rank's columns as VocabLogits; for group None return them as they are."""
        if group is None:
            return local
        if isinstance(group, ShapeOnlyGroup):  # a dry run has no data to keep apart
            return local.new_empty(()).expand(*local.shape[:-1], vocab_size)  # and takes no memory
        logits = local.as_subclass(VocabLogits)
        logits.vocab_size, logits.group = vocab_size, group
        return logits

    def local(self) -> Tensor:
        """Return this rank's columns, padding included, as a plain tensor."""
        return self.as_subclass(torch.Tensor)

    def gathered(self) -> Tensor:
        """Return the unsharded logits [..., V] as a plain tensor, the same on all tp ranks."""
        full = collectives.all_gather(self.local(), -1, self.group, sharded_gradient=False)
        return full.narrow(-1, 0, self.vocab_size)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on the local columns where the result is the same, else on gathered logits."""
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
                if func is functional.cross_entropy and _parallel(x, *args[1:], **kwargs):
                    return _cross_entropy(x, *args[1:], **kwargs)
            args, kwargs = _gather_all((args, kwargs))
            return func(*args, **kwargs)


def _gather_all(value: Any) -> Any:
    """Replace every VocabLogits in nested tuples, lists and dicts by gathered logits."""
    if isinstance(value, VocabLogits):
        return value.gathered()
    if isinstance(value, tuple | list):
        return type(value)(_gather_all(v) for v in value)
    return {k: _gather_all(v) for k, v in value.items()} if isinstance(value, dict) else value


def _on_local(func: Any, x: VocabLogits, rest: tuple, kwargs: dict) -> tuple[Tensor] | None:
    """Return (result on the local columns,), or None when `func` needs the whole vocabulary axis."""
    local = x.local()
    if func in _ELEMENTWISE:
        return (func(local, *rest, **kwargs),)
    if func in _WITH_ANOTHER and len(rest) == 1 and not kwargs:
        other = _beside(x, rest[0])
        return None if other is None else (func(local, other),)
    if func in (torch.Tensor.view, torch.Tensor.reshape) and not kwargs:
        sizes = tuple(rest[0]) if isinstance(rest[0], tuple | list) else rest
        if all(isinstance(s, int) for s in sizes) and sizes[-1:] == (x.vocab_size,):
            return (func(local, (*sizes[:-1], local.shape[-1])),)
    if func is torch.Tensor.__getitem__ and keeps_last_axis(rest[0], local.ndim):
        return (func(local, *rest),)
    return None


def _beside(x: VocabLogits, other: Any) -> Any:
    """Cut an operand of logits [..., V] to the local columns; None where all columns are needed.

    A tensor with a gradient returns None: its gradient would come from this rank's columns only.
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
    n, r = collectives.group_size(x.group), collectives.group_rank(x.group)
    runs = Placement(0, pad=True).runs(x.vocab_size, n, r)
    start, stop = runs[0] if runs else (0, 0)
    return functional.pad(other[..., start:stop], (0, _SHAPE(x)[-1] - (stop - start)))


def keeps_last_axis(index: Any, ndim: int) -> bool:
    """Return whether an index of a tensor with `ndim` axes leaves the last axis whole and last."""
    index = index if isinstance(index, tuple) else (index,)
    if not index or index[-1] is Ellipsis or index[-1] == slice(None):
        return True
    if any(i is Ellipsis for i in index):
        return False
    consumed = sum(i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1
                   for i in index if i is not None)  # fmt: skip
    return consumed < ndim


def _parallel(x: VocabLogits, target: Tensor, weight: Any = None, *_: Any, **kwargs: Any) -> bool:
    """Return whether a call of cross_entropy is the common form: [N, V] against class indices."""
    return x.dim() == 2 and target.dtype == torch.int64 and weight is None


def _cross_entropy(
    x: VocabLogits, target: Tensor, weight: None = None, size_average: None = None, ignore_index: int = -100,
    reduce: None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Replacement of torch.nn.functional.cross_entropy for VocabLogits x [N, V]."""
    loss = vocab_parallel_cross_entropy(
        x.local(), target, x.vocab_size, x.group, ignore_index, label_smoothing
    )
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, vocab_size: int, group: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of each row [N], 0 where the target is ignored; two all-reduces of O(N).

    Args:
        logits: [N, ceil(V / n)], this rank's columns.
        target: [N], class indices in 0..V-1, or ignore_index.
        vocab_size: V.
        group: the tp ranks.
        ignore_index: value of targets that do not count.
        label_smoothing: as in torch.nn.functional.cross_entropy, over V classes.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the parallel loss).
    """
    arguments = (logits, target, vocab_size, group, ignore_index, label_smoothing)
    return _VocabParallelCrossEntropy.apply(*arguments)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, vocab_size, group, ignore_index, smoothing):
        n, r = collectives.group_size(group), collectives.group_rank(group)
        runs = Placement(0, pad=True).runs(vocab_size, n, r)
        start, stop = runs[0] if runs else (0, 0)
        ignored = target == ignore_index
        require_indices(((target >= 0) & (target < vocab_size)) | ignored, "labels", vocab_size)
        valid = logits[:, : stop - start]
        highest = valid.amax(1) if stop > start else logits.new_full((len(logits),), -torch.inf)
        collectives.all_reduce_(highest, group, dist.ReduceOp.MAX)
        exp = (valid - highest[:, None]).exp_()
        ours = (target >= start) & (target < stop)
        index = (target - start).masked_fill(~ours, 0)[:, None]
        picked = valid.gather(1, index)[:, 0] if stop > start else torch.zeros_like(highest)
        sums = [exp.sum(1), picked.masked_fill(~ours, 0.0)]
        if smoothing:
            sums.append(valid.sum(1))
        total = torch.stack(sums)
        collectives.all_reduce_(total, group)
        log_sum = total[0].log() + highest
        loss = log_sum - (1.0 - smoothing) * total[1]
        if smoothing:
            loss = loss - smoothing / vocab_size * total[2]
        ctx.save_for_backward(exp.div_(total[0][:, None]), index, ours, ignored)
        ctx.smoothing, ctx.vocab_size, ctx.width = smoothing, vocab_size, logits.shape[1]
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    @once
    def backward(ctx, grad):
        softmax, index, ours, ignored = ctx.saved_tensors
        smoothing = ctx.smoothing
        scale = grad.masked_fill(ignored, 0.0)[:, None]
        # The saved tensor is not changed in place: backward may run twice (retain_graph).
        d_valid = (softmax - smoothing / ctx.vocab_size if smoothing else softmax) * scale
        if d_valid.shape[1]:
            picked = (ours[:, None] * scale).mul(smoothing - 1.0)
            d_valid.scatter_add_(1, index, picked)
        padding = ctx.width - d_valid.shape[1]
        d_logits = functional.pad(d_valid, (0, padding)) if padding else d_valid
        return d_logits, None, None, None, None, None
