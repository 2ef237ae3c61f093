"""vocab_parallel_linear_cross_entropy: the loss of a head whose vocabulary is sharded, without its logits.

N rows, H hidden size, V classes over n ranks.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.kernel_registry import kernel, operator
from slapo_zoo.kernels import cross_entropy
from slapo_zoo.kernels.linear_cross_entropy import plus_product
from slapo_zoo.kernels.vocab_parallel_cross_entropy import join, local_targets
from slapo_zoo.kernels.vocab_parallel_cross_entropy import reference as logits_reference
from slapo_zoo.parallel import collectives

SHAPES = [(1, 16, 40), (21, 24, 131), (130, 16, 97), (0, 16, 40)]


def reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_size: int,
    group: Any = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Compute the definition of the kernel, on an unsharded weight."""
    logits = x @ weight.T if bias is None else x @ weight.T + bias
    return logits_reference(logits, target, vocab_size, None, ignore_index, label_smoothing)


def inputs(N: int, H: int, V: int, **like: Any) -> dict[str, Any]:
    """Random arguments of one test shape; a third of the rows is ignored, chunks are small."""
    target = torch.randint(V, (N,), device=like.get("device"))
    target[1::3] = -100
    x, weight, bias = torch.randn(N, H, **like), torch.randn(V, H, **like), torch.randn(V, **like)
    return {"x": x, "weight": weight / 4, "target": target, "vocab_size": V, "bias": bias,
            "label_smoothing": 0.1, "chunk_bytes": 64 * V * 4}  # fmt: skip


@kernel(
    "vocab_parallel_linear_cross_entropy", reference, inputs, SHAPES, cpu="chunks, one collective"
)
def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_size: int,
    group: Any = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_bytes: int | None = None,
    summed: bool = False,
) -> Tensor:
    """Compute vocab_parallel_cross_entropy of x weight' + bias without the logits in memory.

    The forward makes the logits chunk by chunk for their statistics, the backward once more for their
    gradient: four GEMMs, O(chunk) memory and still one collective. What fits into one chunk is kept for
    the backward: three GEMMs. dx is summed over the group.

    Args:
        x: [N, H], the same on all ranks.
        weight: [ceil(V / n), H], this rank's rows.
        target: [N], class indices in 0..V-1, or ignore_index.
        vocab_size: V.
        group: the ranks that hold the rows; None for one.
        bias: [ceil(V / n)].
        ignore_index: targets that do not count.
        label_smoothing: as in F.cross_entropy, over V classes.
        chunk_bytes: most bytes of logits at a time.
        summed: what is before x sums its gradient over the group.
    """
    x, weight, bias = cross_entropy.matmul_dtype(x, weight, bias)
    local, counts, width = local_targets(target, vocab_size, group, ignore_index)
    rows = cross_entropy.chunk_rows(x, weight.shape[0], chunk_bytes)
    x = x if summed else collectives.reduce_backward(x, group)
    graded = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    found, _ = _statistics(x, weight, bias, local, width, rows, graded)
    whole = join(found, group)
    return cross_entropy.row_losses(whole, counts, label_smoothing, vocab_size)


def loss_of_sharded_head(
    head: Any, rows: Tensor, target: Tensor, ignore_index: int, smoothing: float, items: Any
) -> Tensor:
    """The loss of rows [N, H] whose head has columns of the vocabulary here; see `Head.loss`."""
    total = vocab_parallel_linear_cross_entropy(
        rows, head.linear.weight, target, head.vocab_size, head.group, head.linear.bias, ignore_index,
        smoothing, summed=head.summed,
    ).sum()  # fmt: skip
    if items is not None:
        return total / items
    number = (target != ignore_index).sum()
    return torch.where(number > 0, total / number.clamp(min=1), torch.nan)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.width, ctx.rows, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_statistics: Tensor, _: Any) -> tuple:
    x, weight, bias, target, out, kept = ctx.saved_tensors
    d = d_statistics.contiguous()
    dx, dw, db = _gradient(x, weight, bias, target, out[0], d, kept, ctx.width, ctx.rows)
    return dx, dw, None if bias is None else db, *[None] * 4


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """Return the columns of real classes, which lie before the padding."""
    w = weight[:width].t()
    if x.device.type == "cpu":
        return products.mm(x, w, None if bias is None else bias[:width])
    out = products.mm_into(cross_entropy.padded_columns(x, len(x), width), x, w)
    return out if bias is None else out.add_(bias[:width])


def _fits(x: Tensor, rows: int, graded: bool) -> bool:
    return graded and x.shape[0] <= rows


def _fake(x, weight, bias, target, width, rows, graded):
    out = x.new_empty((3, x.shape[0]), dtype=cross_entropy.wide_dtype(x))
    return out, x.new_empty((x.shape[0] if _fits(x, rows, graded) else 0, width))


@operator("linear_cross_entropy_statistics", _fake, _setup, _gradients)
def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, width: int, rows: int, graded: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The statistics of each row, and the logits if they fit into one chunk and will be used again."""
    if _fits(x, rows, graded):
        logits = _logits(x, weight, bias, width)
        return cross_entropy.statistics(logits, target), logits
    out = x.new_empty((3, len(x)), dtype=cross_entropy.wide_dtype(x))
    for i in range(0, len(x), rows):
        part = slice(i, i + rows)
        logits = _logits(x[part], weight, bias, width)
        out[:, part] = cross_entropy.statistics(logits, target[part])
    return out, x.new_empty((0, width))


def _fake_gradient(x, weight, bias, target, log_sum, d_statistics, kept, width, rows):
    db = weight.new_empty(weight.shape[0] if bias is not None else 0)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), db


@operator("linear_cross_entropy_gradient", _fake_gradient)
def _gradient(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    log_sum: Tensor,
    d_statistics: Tensor,
    kept: Tensor,
    width: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = cross_entropy.wide_dtype(x)
    dx, dw = x.new_empty(x.shape), weight.new_empty(weight.shape)
    dw[width:].zero_()
    total = None if len(kept) else dw[:width].zero_()
    db = weight.new_zeros(len(weight) if bias is not None else 0, dtype=wide)
    for i in range(0, len(x), rows):
        part = slice(i, i + rows)
        make = cross_entropy.gradient if len(kept) else cross_entropy.gradient_
        logits = kept if len(kept) else _logits(x[part], weight, bias, width)
        g = make(logits, target[part], log_sum[part], d_statistics[:, part])
        products.mm_into(dx[part], g, weight[:width])
        if total is None:
            products.mm_into(dw[:width], g.t(), x)
        else:
            total = plus_product(total, g.t(), x[part], wide)
        if bias is not None:
            db[:width] += g.sum(0, dtype=wide)
    if total is not None and total.data_ptr() != dw.data_ptr():
        dw[:width] = total
    return dx, dw, db.to(weight.dtype)
