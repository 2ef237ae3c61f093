"""vocab_parallel_linear_cross_entropy: the loss of a head whose vocabulary is divided, without its logits.

N rows, H hidden size, V classes over n ranks.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo import collectives
from slapo_zoo.kernel import kernel, operator
from slapo_zoo.kernels import cross_entropy
from slapo_zoo.kernels.vocab_parallel_cross_entropy import join, local_targets
from slapo_zoo.kernels.vocab_parallel_cross_entropy import reference as logits_reference

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
    """The definition, on a whole weight."""
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
    """As vocab_parallel_cross_entropy of x weight' + bias, without the logits.

    The forward makes the logits chunk by chunk for their statistics, the backward once more for their
    gradient: four GEMMs, O(chunk) memory and still one collective. dx is summed over the group.

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
    bias = None if bias is None else bias[:width]
    rows = cross_entropy.chunk_rows(x, weight.shape[0], chunk_bytes)
    x = x if summed else collectives.reduce_backward(x, group)
    whole = join(_statistics(x, weight[:width], bias, local, rows), group)
    return cross_entropy.row_losses(whole, counts, label_smoothing, vocab_size)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    *tensors, ctx.rows = inputs
    ctx.save_for_backward(*tensors, output)


def _gradients(ctx: Any, d_statistics: Tensor) -> tuple:
    x, weight, bias, target, out = ctx.saved_tensors
    dx, dw, db = _gradient(x, weight, bias, target, out[0], d_statistics.contiguous(), ctx.rows)
    return dx, dw, None if bias is None else db, None, None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def _fake(x, weight, bias, target, rows):
    return x.new_empty((3, x.shape[0]), dtype=cross_entropy.wide_dtype(x))


@operator("linear_cross_entropy_statistics", _fake, _setup, _gradients)
def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int
) -> Tensor:
    out = x.new_empty((3, len(x)), dtype=cross_entropy.wide_dtype(x))
    for i in range(0, len(x), rows):
        part = slice(i, i + rows)
        out[:, part] = cross_entropy.statistics(_logits(x[part], weight, bias), target[part])
    return out


def _fake_gradient(x, weight, bias, target, log_sum, d_statistics, rows):
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
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = cross_entropy.wide_dtype(x)
    dx = x.new_empty(x.shape)
    dw = weight.new_zeros(weight.shape, dtype=wide)
    db = weight.new_zeros(len(weight) if bias is not None else 0, dtype=wide)
    for i in range(0, len(x), rows):
        part = slice(i, i + rows)
        logits = _logits(x[part], weight, bias)
        g = cross_entropy.gradient_(logits, target[part], log_sum[part], d_statistics[:, part])
        torch.mm(g, weight, out=dx[part])
        dw += g.t() @ x[part]
        if bias is not None:
            db += g.sum(0, dtype=wide)
    return dx, dw.to(weight.dtype), db.to(weight.dtype)
