"""Logits that are computed only when code reads them; their loss is computed from the hidden states alone.

In training, an LM head whose forward a kernel replaces returns such logits. The unmodified loss code of `transformers`
runs on them: `view(-1, V)`, slices and casts act on the hidden states (rows [..., H]) behind them, and `cross_entropy`
becomes a loss of the rows whose target is not ignored. Any other operation computes the logits, once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.kernels.loss.lm_loss import lm_loss
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits, keeps_last_axis, sizes_before
from slapo_zoo.parallel.known import IGNORED, known, places
from slapo_zoo.parallel.once import once
from slapo_zoo.parallel.ranks.heartbeat import names_of
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.patience import meet
from slapo_zoo.parallel.stand_ins import as_read_now

_TENSOR: Any = torch.Tensor  # its attributes are descriptors, which type checkers do not know
_KNOWN = {
    _TENSOR.shape.__get__, _TENSOR.dtype.__get__, _TENSOR.device.__get__, _TENSOR.ndim.__get__,
    _TENSOR.is_cuda.__get__, _TENSOR.layout.__get__, torch.Tensor.size, torch.Tensor.dim,
    torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__,
    _TENSOR.requires_grad.__get__, _TENSOR.grad_fn.__get__, _TENSOR.is_leaf.__get__,
}  # fmt: skip
_CASTS = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.contiguous}
_ENGINES = ("torch.distributed.", "deepspeed.", "megatron.", "accelerate.")
_OF_GRADIENT = (torch.Tensor.retain_grad, torch.Tensor.register_hook)


@dataclass
class Head:
    """Language-model head, which maps hidden states (rows) to logits, or straight to their loss.

    Args:
        linear: module with the weight [V, H] (over tp: a shard of its rows) and bias.
        logits: maps rows [..., H] to logits [..., V], or to this rank's columns of the logits if `group` shards them.
        before: function that maps rows to the rows for `linear` (BERT's transform), or None.
        vocab_size: number of classes V.
        group: ranks that shard the vocabulary, or None.
        summed: True if the module before the head all-reduces the gradient of the rows over `group`, so that the loss
            must not.
        root: module whose weights `logits` reads; None takes `linear`.
        within: function that returns a context in which the weights of `root` can be read outside of its forward (cast
            by mixed precision, gathered by ZeRO or FSDP); None: one that does so for any of these engines.
    """

    linear: Any
    logits: Callable[[Tensor], Tensor]
    before: Callable[[Tensor], Tensor] | None = None
    vocab_size: int = 0
    group: Any = None
    summed: bool = False
    root: Any = None
    within: Callable[[], AbstractContextManager] | None = None

    def __post_init__(self) -> None:
        if self.within is None:
            self.within = as_read_now(self.root or self.linear)

    def loss(
        self, rows: Tensor, target: Tensor, ignore_index: int, smoothing: float, items: Any
    ) -> Tensor:
        """Return the summed loss of rows [N, H] divided by `items` (None: number of targets that are not ignored);
        `smoothing` is the label smoothing.
        """
        with self.reading():
            return self._loss(rows, target, ignore_index, smoothing, items)

    def reading(self) -> AbstractContextManager:
        """Context in which the head's weights are as in its forward: cast by mixed precision, gathered by ZeRO or FSDP."""
        assert self.within is not None  # noqa: S101 - set above
        return self.within()

    def _loss(
        self, rows: Tensor, target: Tensor, ignore_index: int, smoothing: float, items: Any
    ) -> Tensor:
        if self.before is not None or self.group is not None:
            at = places(
                target != ignore_index, known().targets if ignore_index == IGNORED else None
            )
            rows, target = rows.index_select(0, at), target[at]
        rows = rows if self.before is None else self.before(rows)
        return lm_loss(
            rows, self.linear.weight, target, self.linear.bias, ignore_index, smoothing, items,
            vocab_size=self.vocab_size, group=self.group, summed=self.summed,
        )  # fmt: skip


def may_defer(module: Any, rows: Tensor) -> bool:
    """Return whether the head `module` may return logits of the hidden states `rows` that are computed only when read.

    It may in training, with real (not fake or meta) tensors, and outside torch.compile.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    real = not isinstance(rows, FakeTensor) and not rows.is_meta
    trains = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return trains and real and not getattr(module, "makes_logits_at_once", False)


def make_logits_at_once(model: Any) -> None:
    """Make LM heads compute logits in the forward, for engines that gather a weight only while its module runs."""
    for module in model.modules():
        module.makes_logits_at_once = True


class LogitsOnDemand(torch.Tensor):
    """Tensor subclass for logits that are not computed yet: any operation but a view, a cast or cross_entropy computes them."""

    rows: Tensor
    head: Head
    parent: "LogitsOnDemand | None"
    make: Callable[[Tensor], Tensor]
    made: Tensor | None
    made_version: int
    read: Tensor | None
    passed_by: bool
    version: int

    @staticmethod
    def of(rows: Tensor, head: Head) -> Tensor:
        """Return the logits [..., V] that `head` maps hidden states `rows` [..., H] to, not computed yet."""
        dtype = rows.dtype
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
        return LogitsOnDemand._new(rows, head, dtype, head.logits, None)

    @staticmethod
    def _new(
        rows: Tensor, head: Head, dtype: torch.dtype, make: Callable[[Tensor], Tensor],
        parent: "LogitsOnDemand | None",
    ) -> Tensor:  # fmt: skip
        """Return logits of `dtype` that are not computed yet. The function `make` computes them from the hidden
        states `rows` or, for a view, cast or copy, from the logits `parent`.
        """
        source = rows if parent is None else parent
        with head.reading():
            weight = head.linear.weight
        return _Deferred.apply(source, weight, rows, head, dtype, make, parent)

    def divided(self, vocab_size: int, group: Any) -> Tensor:
        """Return logits of the same hidden states with `vocab_size` classes sharded over the ranks of `group`: a rank
        computes its own columns, the loss combines all ranks. Return these logits themselves if `group` is None.
        """
        if group is None:
            return self
        head = replace(self.head, vocab_size=vocab_size, group=group, summed=True)
        return LogitsOnDemand._new(self.rows, head, self.dtype, self.make, None)

    def tensor(self) -> Tensor:
        """Return the logits [..., V] as a plain tensor with an autograd graph; the first call computes them. If the
        ranks of the head's `group` hold some columns each, all of them must call this.
        """
        if self.made is None:
            self._require_same_weights()
            with torch.enable_grad():  # a loss may use them after a metric did
                self.made = self._of_rows() if self.parent is None else self._of_parent(self.parent)
            self.made_version = self.made._version
            with torch._C.DisableTorchFunctionSubclass():
                hooks = self._backward_hooks or {}
            for hook in hooks.values():
                self.made.register_hook(hook)
        return self.made

    def numbers(self) -> Tensor:
        """Return the values of the logits without an autograd graph. Raise SlapoError if code has changed the logits in
        place, because the change would get no gradient.
        """
        if self.changed():
            problem = "the logits were changed in place, and this operation would lose the gradient of the change"
            hint = "use the tensor that the in-place operation returned, or change a copy, logits.clone()"
            raise SlapoError("output", "logits", problem, hint)
        if self.made is not None:
            return self.made.detach()
        if self.read is None:
            self._require_same_weights()
            with torch.no_grad():
                parent = self.parent
                self.read = self._of_rows() if parent is None else self.make(parent.numbers())
        return self.read

    def changed(self) -> bool:
        """Return whether the computed logits, or those that they are a view of, were changed in place."""
        mine = self.made is not None and self.made._version != self.made_version
        return mine or (self.parent is not None and self.parent.changed())

    def _of_rows(self) -> Tensor:
        with rank_guard("output.logits, which all ranks of tp look at or none"):
            if self.head.group is not None:
                _require_all(dist.get_process_group_ranks(self.head.group))
            with self.head.reading():
                return _all_classes(self.make(self.rows), self.head)

    def _of_parent(self, parent: "LogitsOnDemand") -> Tensor:
        """Compute these logits, a view, cast or copy of the logits `parent`, from the values of `parent`.

        If these logits are a copy (`clone`) and the parent was changed in place, the parent's values from before
        the change are taken; a view shows the change.
        """
        whole = parent.tensor()
        made = self.make(whole)
        if parent.changed() and made.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            return self.make(parent._as_before())
        return made

    def _as_before(self) -> Tensor:
        return self._of_rows() if self.parent is None else self.make(self.parent._as_before())

    def _require_same_weights(self) -> None:
        with self.head.reading():
            version = self.head.linear.weight._version
        if version != self.version:
            hint = 'read the logits before optimizer.step(), or load the model with kernels="reference"'
            problem = "logits are computed when first read, here after the weights have changed"
            raise SlapoError("output", "logits", problem, hint)

    def cross_entropy_over(self, items: float, target: Tensor, **options: Any) -> Tensor:
        """Return the summed cross-entropy of `target` [N] divided by `items`; `options` are those of F.cross_entropy."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.untouched() and _is_supported(self, target, **options):
                return _cross_entropy(self, target, items=items, **options)
        return functional.cross_entropy(self, target, **{**options, "reduction": "sum"}) / items

    def untouched(self) -> bool:
        """Return True while neither these logits nor those that they are a view of have been computed."""
        nobody = self.made is None and self.read is None
        return nobody and (self.parent is None or self.parent.untouched())

    @classmethod
    @_disable_dynamo  # a compiled loss gets the logits, made before its graph begins
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on the hidden states where that gives the same result, else on computed logits."""
        kwargs, x = kwargs or {}, args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in _KNOWN:
                return func(*args, **kwargs)
            if func is torch.Tensor.register_hook and _is_of_an_engine(*args, **kwargs):
                return func(*args, **kwargs)
            if func in _OF_GRADIENT and x.passed_by:  # pyright: ignore[reportOptionalMemberAccess]
                hint = 'load the model with kernels="reference", whose loss reads the logits'
                problem = "the loss was computed without these logits, so they have no gradient"
                raise SlapoError("output", f"logits.{func.__name__}()", problem, hint)
            if isinstance(x, LogitsOnDemand) and torch.is_grad_enabled() and x.untouched():
                if (found := _on_rows(func, x, args[1:], kwargs)) is not None:
                    return found
                if func is functional.cross_entropy and _is_supported(x, *args[1:], **kwargs):
                    return _cross_entropy(x, *args[1:], **kwargs)
        args, kwargs = tree_map_only(LogitsOnDemand, LogitsOnDemand.tensor, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LogitsOnDemand, LogitsOnDemand.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Deferred(torch.autograd.Function):
    """Autograd node of logits that are not computed yet, for code that bypasses `__torch_function__` (C++, autograd
    functions).

    Its backward computes the logits and continues through their graph.
    """

    @staticmethod
    def forward(ctx: Any, source, weight, rows, head, dtype, make, parent):
        wrap: Any = torch.Tensor._make_wrapper_subclass
        shape = (*rows.shape[:-1], head.vocab_size)
        logits = wrap(LogitsOnDemand, shape, dtype=dtype, device=rows.device)
        logits.rows, logits.head, logits.make, logits.made = rows, head, make, None
        logits.read, logits.parent, logits.version = None, parent, weight._version
        logits.passed_by, logits.made_version = False, 0
        ctx.save_for_backward(rows)
        ctx.parts = head, make, parent
        ctx.dtype = None if parent is None else parent.dtype
        return logits

    @staticmethod
    @once
    def backward(ctx: Any, d_logits):
        (rows,), (head, make, parent) = ctx.saved_tensors, ctx.parts
        if parent is None:
            source = rows.detach().requires_grad_()
        else:  # a cast or a view reads no values
            shape = (*parent.rows.shape[:-1], head.vocab_size)
            source = rows.new_empty(shape, dtype=ctx.dtype).requires_grad_()
        with torch.enable_grad(), head.reading():
            logits = _all_classes(make(source), head) if parent is None else make(source)
        torch.autograd.backward(logits, d_logits)  # the head's parameters get their share here
        return source.grad, *[None] * 6


def _all_classes(logits: Any, head: Head) -> Tensor:
    """Return logits of all classes [..., V] as a plain tensor; all-gather those that the group of `head` shards."""
    if isinstance(logits, LogitsOnDemand):
        return logits.tensor()
    if not isinstance(logits, VocabLogits):
        logits = VocabLogits.wrap(logits, head.vocab_size, head.group) if head.group else logits
    return logits.gathered() if isinstance(logits, VocabLogits) else logits


def _require_all(ranks: list[int]) -> None:
    """Wait until all `ranks`, which shard the vocabulary, call this to read the logits; MeshError if one does not."""
    if gone := meet("output.logits", ranks):
        problem = f"{names_of(gone)} did not read the logits, and each tp rank has some of their columns only"
        hint = (
            "read them on all tp ranks, which then get all columns, and print them on one; "
            'kernels="reference" computes them in every forward'
        )
        raise MeshError("output", "logits", problem, hint)


def _on_rows(func: Any, x: LogitsOnDemand, rest: tuple, kwargs: dict) -> Tensor | None:
    """Return the cast, view or slice func(x, *rest, **kwargs) of logits, still not computed; None for any other call."""
    if func in _CASTS:
        dtype = _cast_to(func, x, rest, kwargs)
        found = None if dtype is None else (x.rows, dtype)
    elif (sizes := sizes_before(x.head.vocab_size, func, rest, kwargs)) is not None:
        found = x.rows.reshape(*sizes, x.rows.shape[-1]), x.dtype
    elif (
        func is torch.Tensor.__getitem__ and _is_slice(rest[0]) and keeps_last_axis(rest[0], x.ndim)
    ):
        found = x.rows[rest[0]], x.dtype
    else:
        found = None
    if found is None:
        return None
    return LogitsOnDemand._new(
        found[0], x.head, found[1], lambda logits: func(logits, *rest, **kwargs), x
    )


def _is_of_an_engine(_x: Any, hook: Any) -> bool:
    """Return whether a tensor's hook is from FSDP2, DeepSpeed or a similar engine, whose hooks ignore the gradient."""
    return str(getattr(hook, "__module__", "")).startswith(_ENGINES)


def _is_slice(index: Any) -> bool:
    """Return whether an index has only slices, integers, None and `...`; an index tensor could change before it is used."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, slice | int) or part is None or part is Ellipsis for part in parts)


def _cast_to(func: Any, x: Tensor, rest: tuple, kwargs: dict) -> torch.dtype | None:
    """Return the dtype of the cast func(x, *rest, **kwargs); None for a call that is no plain cast."""
    if func is torch.Tensor.float:
        return torch.float32
    if func is torch.Tensor.contiguous:
        return x.dtype
    if len(rest) != 1 or kwargs:
        return None
    if isinstance(rest[0], torch.dtype):
        return rest[0]
    return (
        x.dtype if not isinstance(rest[0], Tensor) and torch.device(rest[0]) == x.device else None
    )


def _is_supported(
    x: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> bool:  # fmt: skip
    """Return whether `_cross_entropy` supports a call: logits [N, V], targets that are class indices, a scalar result."""
    given = weight is None and size_average is None and reduce is None
    return given and reduction != "none" and x.dim() == 2 and target.dtype == torch.int64


def _cross_entropy(
    x: LogitsOnDemand, target: Tensor, weight: None = None, size_average: None = None, ignore_index: int = -100,
    reduce: None = None, reduction: str = "mean", label_smoothing: float = 0.0, items: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute F.cross_entropy (same signature) from hidden states; `items`, if given, is the divisor of the mean."""
    whose: LogitsOnDemand | None = x
    while whose is not None:
        whose.passed_by, whose = True, whose.parent
    items = 1 if reduction == "sum" else items
    return x.head.loss(x.rows, target, ignore_index, label_smoothing, items)
