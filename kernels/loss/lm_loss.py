"""Loss of a language model, from logits or from hidden states whose logits are computed chunk by chunk.

From logits, three statistics per row are combined over the ranks that shard the vocabulary. From hidden states,
only a chunk of rows has logits at a time; the gradients of x, weight and bias are computed in the same pass
(three GEMMs), and the backward only scales them. A rank sends 12 bytes per row. N rows, H hidden size, V
classes over n ranks, C = ceil(V / n) columns on each.

Source of the parallel loss: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.choose_kernel import in_triton
from slapo_zoo.dispatch.kernel_registry import operator
from slapo_zoo.kernels.loss import cross_entropy
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.local_tensors import require_indices
from slapo_zoo.parallel.once import once
from slapo_zoo.parallel.placement import Placement

ROWS = 1024  # rows of a gradient that a CPU holds in fp32 at a time
ELEMENTS = 1 << 25  # the same on a GPU, where each piece takes four launches


def lm_loss(
    x: Tensor,
    weight: Tensor | None,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_items: Tensor | float | None = None,
    chunk_bytes: int | None = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
    group: Any = None,
    summed: bool = False,
) -> Tensor:
    """Return the cross-entropy in fp32, the same on all ranks; the mean over no targets is NaN.

    Args:
        x: hidden states [N, H], equal on all ranks; without a weight the logits [N, C].
        weight: this rank's rows [C, H] of the head, tied to the embedding or not; None for logits.
        target: [N], class indices in 0..V-1, or ignore_index.
        bias: [C], or None.
        ignore_index: target of rows without a loss.
        label_smoothing: as in F.cross_entropy, over V classes.
        num_items: divisor of the sum; None for the number of targets that are not ignored.
        chunk_bytes: most bytes of logits at a time; None chooses by device and dtype.
        reduction: "mean" or "sum" give a scalar; for logits also "none": [N]. `num_items` is used with "mean" only.
        vocab_size: number of classes V; None for the number of columns on this rank.
        group: process group whose ranks have C classes each, the last ranks perhaps padding; None: not sharded.
        summed: True if the backward of the module that made x all-reduces the gradient of x over `group`; False: the
            backward of this loss does.
    """
    counts, ignored = target != ignore_index, target == ignore_index
    columns = x.shape[1] if weight is None else weight.shape[0]
    V = columns if vocab_size is None else vocab_size
    items = 1 if reduction == "sum" else num_items
    require_indices(((target >= 0) & (target < V)) | ignored, "labels", V)
    target = target.masked_fill(ignored, -1)
    if weight is None:
        losses = _row_losses(x, target, label_smoothing, V, group)
        return losses if reduction == "none" else _mean(losses.sum(), counts, items)
    x, weight, bias = cross_entropy.to_autocast_dtype(x, weight, bias)
    x = x if summed else collectives.reduce_backward(x, group)
    tensors = [t for t in (x, weight, bias) if t is not None]
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    rows = cross_entropy.chunk_rows(x, columns, chunk_bytes)
    wide = cross_entropy.wide_dtype(x)
    if isinstance(items, int | float):
        items = x.new_full((), items, dtype=wide)  # a copy to a GPU would wait for it
    number = counts.sum() if items is None else torch.as_tensor(items, device=x.device)
    divisor = number.detach().clamp(min=1).to(wide) if items is None else number.detach().to(wide)
    given = (x, weight, bias, target, divisor, label_smoothing, rows, graded)
    total: Any = _mean_loss(*given) if group is None else _OverRanks.apply(*given, V, group)
    return total[0] if items is not None else torch.where(number > 0, total[0], torch.nan)


def _mean(total: Tensor, counts: Tensor, items: Tensor | float | None) -> Tensor:
    """Return total / items. For items None the divisor is the number of True in `counts`; if that is 0, the result is
    NaN with zero gradients.
    """
    if items is not None:
        return total / items
    number = counts.sum()
    return torch.where(number > 0, total / number.clamp(min=1), torch.nan)


def _row_losses(
    logits: Tensor, target: Tensor, smoothing: float, vocab_size: int, group: Any
) -> Tensor:
    """Return the loss [N] of each row of logits [N, C], 0 where the target is -1; `smoothing` is the label smoothing.
    `group` are the ranks that shard the classes, over which three statistics per row are all-gathered.
    """
    start, stop = own_columns(vocab_size, group)
    found = cross_entropy.statistics(logits[:, : stop - start], _local(target, start, stop))
    whole = _joined(found, group)
    return cross_entropy.row_losses(whole, target >= 0, smoothing, vocab_size)


def own_columns(vocab_size: int, group: Any) -> tuple[int, int]:
    """Return (first, end): this rank has classes first..end-1 of the `vocab_size` classes that `group` shards."""
    n, r = collectives.group_size(group), collectives.group_rank(group)
    runs = Placement(0, pad=True).runs(vocab_size, n, r)
    return runs[0] if runs else (0, 0)


def _local(target: Tensor, start: int, stop: int) -> Tensor:
    """Return the column of each class in `target` [N] on this rank, which holds classes start..stop-1; -1 elsewhere."""
    return torch.where((target >= start) & (target < stop), target - start, -1)


def _joined(statistics: Tensor, group: Any) -> Tensor:
    """Return each row's log-sum-exp, target's logit and sum of logits [3, N] over all classes, combined from those
    `statistics` [3, N] of each rank of `group`, which are all-gathered. Every rank computes the same loss from them, so
    the gradient of its own columns is complete.
    """
    if group is None:
        return statistics
    return cross_entropy.join(collectives.all_gather(statistics[None], 0, group, False))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, _weight, bias, _target, divisor, *_ = inputs
    ctx.has_bias, ctx.inputs = bias is not None, len(inputs)
    ctx.divisor = None if _divides_first(x) else divisor
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: Any, d_loss: Tensor, *_: Any) -> tuple:
    d = d_loss if ctx.divisor is None else d_loss / ctx.divisor
    dx, dw, db = (_scaled(t, d) for t in ctx.saved_tensors)
    return dx, dw, db if ctx.has_bias else None, *[None] * (ctx.inputs - 3)


def _divides_first(x: Tensor) -> bool:
    """Return whether the forward may divide the gradients by the number of targets: not in fp16, where they would underflow."""
    return x.dtype != torch.float16


def _scaled(t: Tensor, d: Tensor) -> Tensor:
    """Return t * d for a scalar d in fp32; rounding d to bf16 would change all gradients by up to 0.2 %.

    On a CPU t itself is returned for d = 1 (`loss.backward()`); on a GPU reading d would wait for the device.
    """
    is_traced = torch.compiler.is_compiling() or type(d) is not Tensor
    if not is_traced and d.device.type == "cpu" and d.item() == 1.0:
        return t
    if t.dtype == d.dtype:
        return t * d
    if is_traced or not t.numel():
        return (t.to(d.dtype) * d).to(t.dtype)
    out = torch.empty_like(t)
    rows = max(ELEMENTS // max(t[0].numel(), 1), 1) if t.is_cuda else ROWS
    for part, piece in zip(out.split(rows), t.split(rows), strict=True):  # few rows in fp32 at once
        part.copy_(piece.to(d.dtype).mul_(d))
    return out


def _fake(x, weight, bias, target, divisor, smoothing, rows, graded):
    (N, H), V = x.shape, weight.shape[0]  # not len(): it would fix the number of rows
    n = 1 if graded else 0
    db = x.new_empty(V * n if bias is not None else 0)
    total = x.new_empty((), dtype=cross_entropy.wide_dtype(x))
    return total, x.new_empty((N * n, H)), x.new_empty((V * n, H)), db


@operator("linear_cross_entropy", _fake, _setup, _gradients)
def _mean_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, divisor: Tensor,
    smoothing: float, rows: int, graded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (sum of the losses / divisor, and its gradients with respect to x, weight and bias).

    Rows with target -1 have no loss. `rows` is the number of rows per chunk, `smoothing` the label
    smoothing; with `graded` False the gradients are empty tensors.
    """
    return _one_pass(x, weight, bias, target, divisor, smoothing, rows, graded, len(weight), None)


class _OverRanks(torch.autograd.Function):
    """Autograd function: loss and gradients of an LM head whose classes are sharded over the ranks of a group."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return _one_pass(*inputs)

    setup_context = staticmethod(_setup)
    backward = staticmethod(once(_gradients))


def _one_pass(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, divisor: Tensor,
    smoothing: float, rows: int, graded: bool, vocab_size: int, group: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (sum of losses / divisor, gradients of x, weight, bias) of an LM head, computed `rows` rows at a time.

    Rows with target -1 have no loss; with `graded` False the gradients are empty tensors. If the ranks of `group`
    shard the `vocab_size` classes (None: not sharded), each chunk of rows takes an all-gather.
    """
    wide = cross_entropy.wide_dtype(x)
    start, stop = own_columns(vocab_size, group)
    padding = len(weight) - (stop - start)  # rows of padding, after those of real classes
    weight, bias = weight[: stop - start], None if bias is None else bias[: stop - start]
    scale = 1.0 / divisor if _divides_first(x) else torch.ones_like(divisor)
    total = x.new_zeros((), dtype=wide)
    n = 1 if graded else 0
    dx = x.new_zeros((len(x) * n, x.shape[1]))
    dw = None
    db = x.new_zeros(len(weight) * n if bias is not None else 0, dtype=wide)
    at = None
    if x.device.type == "cpu":  # ignored rows are skipped; on a GPU that would wait for the device
        at = (target >= 0).nonzero()[:, 0]
        at = None if len(at) == len(target) else at
    kept_x, kept_target = (x, target) if at is None else (x[at], target[at])
    kept_dx = dx if at is None or not graded else x.new_empty(kept_x.shape)
    chunk = cross_entropy.padded_columns(x, min(rows, len(kept_x)), len(weight))
    for i in range(0, len(kept_x), rows):
        part = slice(i, i + rows)
        logits = products.mm_into(chunk[: len(kept_x[part])], kept_x[part], weight.t())
        if bias is not None:
            logits += bias
        own = (kept_target[part], smoothing, scale, vocab_size, group)
        loss, logits = _loss_and_gradient_(logits, *own)
        total += loss
        if graded:
            products.mm_into(kept_dx[part], logits, weight)
            dw = _plus_product(dw, logits.t(), kept_x[part], wide)
            if bias is not None:
                db += logits.sum(0, dtype=wide)
    if graded and at is not None:
        dx.index_copy_(0, at, kept_dx)
    dw = x.new_zeros((len(weight) * n, x.shape[1])) if dw is None else dw.to(x.dtype)
    if graded and padding:
        dw = functional.pad(dw, (0, 0, 0, padding))
        db = db if bias is None else functional.pad(db, (0, padding))
    return total / divisor, dx, dw, db.to(x.dtype)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return total + a @ b, summed in dtype `wide`; if `total` is None, return a @ b in the dtype of a."""
    if total is None:
        return products.mm(a, b)
    if wide == a.dtype:
        return products.add_mm_(total, a, b)
    return total.to(wide).add_(products.mm(a, b))


def _loss_and_gradient_(
    logits: Tensor, target: Tensor, smoothing: float, scale: Tensor, vocab_size: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Return (sum of a chunk's losses, the logits overwritten by the gradient of `scale` times that sum). `target`
    [rows] is -1 where ignored, `smoothing` the label smoothing, `group` the ranks that shard the classes, or None.
    """
    counts = target >= 0
    if in_triton(logits) or group is not None:
        start, stop = own_columns(vocab_size, group)
        local = _local(target, start, stop)
        whole = _joined(cross_entropy.statistics(logits, local), group)
        each = scale * counts
        d = torch.stack([each, each * (smoothing - 1.0), each * (-smoothing / vocab_size)])
        losses = cross_entropy.row_losses(whole, counts, smoothing, vocab_size)
        return losses.sum(), cross_entropy.gradient_(logits, local, whole[0], d)
    total = logits.new_zeros((), dtype=cross_entropy.wide_dtype(logits))
    for part in cross_entropy.row_blocks(logits):
        total += _rows_in_cache_(logits[part], target[part], counts[part], smoothing, scale)
    return total, logits


def _rows_in_cache_(
    logits: Tensor, target: Tensor, counts: Tensor, smoothing: float, scale: Tensor
) -> Tensor:
    """Return the summed loss of the logits' rows; overwrite the logits by the gradient of `scale` times that sum. The
    rows must fit the cache of a CPU. `counts` [rows] is False for ignored rows; `smoothing` is the label smoothing.
    """
    wide = logits.to(cross_entropy.wide_dtype(logits))
    at = target.clamp(min=0)[:, None]
    picked, total = wide.gather(1, at)[:, 0], wide.sum(1) if smoothing else wide[:, 0]
    highest = wide.amax(1)
    softmax = torch.softmax(wide, 1)
    log_sum = highest - softmax.amax(1).log_()  # one pass less than another log-sum-exp
    V = logits.shape[1]
    losses = cross_entropy.row_losses(torch.stack([log_sum, picked, total]), counts, smoothing, V)
    if smoothing:
        softmax.sub_(smoothing / V)
    softmax.scatter_add_(1, at, torch.full_like(picked, smoothing - 1.0)[:, None])
    if logits.device.type != "cpu":  # on a CPU ignored rows were left out before
        softmax.mul_(counts[:, None])
    torch.mul(softmax, scale, out=logits)
    return losses.sum()
