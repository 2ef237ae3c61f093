"""Operators of the language-model losses: three statistics for each row of logits, and the gradient of the logits
from the gradients of the statistics.

The statistics are the log-sum-exp, the target's logit (0 if another rank holds it) and the sum of the logits:
enough to combine shards of the vocabulary. A rank reads its logits once for the loss and once for the gradient,
and sends 12 bytes per row. N rows, C columns (of one shard), V classes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.choose_kernel import in_triton
from slapo_zoo.dispatch.kernel_registry import operator

CACHED = 1 << 21  # bytes of fp32 logits per block on a CPU, for several passes in cache


def _fake(logits: Tensor, target: Tensor) -> Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=wide_dtype(logits))


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _gradients(ctx: Any, d_statistics: Tensor) -> tuple:
    logits, target, out = ctx.saved_tensors
    return gradient(logits, target, out[0], d_statistics.contiguous()), None


@operator("cross_entropy_statistics", _fake, _setup, _gradients)
def statistics(logits: Tensor, target: Tensor) -> Tensor:
    """Return [3, N] in fp32: log-sum-exp of each row of logits [N, C] (all classes or a shard of them), its target's
    logit (0 for -1), and the sum of its logits. `target` [N] is the target's column, -1 if in another shard or ignored.
    """
    if in_triton(logits):
        from slapo_zoo.kernels.loss import cross_entropy_triton

        by_row = logits if logits.stride(1) == 1 else logits.contiguous()
        return cross_entropy_triton.statistics(by_row, target)
    out = logits.new_zeros((3, len(logits)), dtype=wide_dtype(logits))
    if not logits.shape[1]:
        out[0] = -torch.inf
        return out
    out[1] = logits.gather(1, target.clamp(min=0)[:, None])[:, 0].masked_fill_(target < 0, 0.0)
    for part in row_blocks(logits):
        wide = logits[part].to(out.dtype)
        out[0, part], out[2, part] = torch.logsumexp(wide, 1), wide.sum(1)
    return out


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `logits`: each fits the cache of a CPU; on a GPU a single slice has all rows."""
    row = logits.shape[1] * wide_dtype(logits).itemsize
    rows = len(logits) if logits.is_cuda else CACHED // row
    for i in range(0, len(logits), max(rows, 1)):
        yield slice(i, i + max(rows, 1))


def padded_columns(like: Tensor, rows: int, columns: int) -> Tensor:
    """Allocate uninitialised logits [rows, columns] of the dtype and device of `like`. On a GPU, each row is padded in
    memory to a multiple of 64 elements: loads and stores are 16 bytes wide, and GEMMs get an aligned leading dimension.
    """
    if like.device.type == "cpu" and not in_triton(like):
        return like.new_empty((rows, columns))
    return like.new_empty((rows, -(-columns // 64) * 64))[:, :columns]


def join(parts: Tensor) -> Tensor:
    """Combine the statistics [n, 3, N] of n vocabulary shards into those [3, N] of all classes: each row's log-sum-exp,
    its target's logit (0 in a shard that lacks the target) and the sum of its logits.
    """
    return torch.stack([parts[:, 0].logsumexp(0), parts[:, 1].sum(0), parts[:, 2].sum(0)])


def row_losses(whole: Tensor, counts: Tensor, smoothing: float, vocab_size: int) -> Tensor:
    """Return the cross-entropy [N] of each row from `whole` [3, N]: log-sum-exp, target's logit and sum of all logits.

    `counts` [N] is False for ignored rows, whose loss is 0; `smoothing` is the label smoothing over
    `vocab_size` classes.
    """
    log_sum, picked, total = whole.unbind(0)
    loss = log_sum - (1.0 - smoothing) * picked
    if smoothing:
        loss = loss - smoothing / vocab_size * total
    return loss.masked_fill(~counts, 0.0)


@operator("cross_entropy_gradient", lambda logits, *rest: padded_columns(logits, *logits.shape))
def gradient(logits: Tensor, target: Tensor, log_sum: Tensor, d_statistics: Tensor) -> Tensor:
    """Return the gradient [N, C] of the logits: softmax * d[0] + onehot * d[1] + d[2], with d = d_statistics.

    Args:
        logits: [N, C], all classes or a shard of them.
        target: [N], the target's column in `logits`, or -1 if it is in another shard or ignored.
        log_sum: [N], log-sum-exp of each row over all classes.
        d_statistics: [3, N], gradient of the three `statistics`: log-sum-exp, target's logit, sum of the logits.
    """
    out = padded_columns(logits, *logits.shape)
    if in_triton(logits):
        return gradient_(out.copy_(logits), target, log_sum, d_statistics)
    return _gradient_into(out, logits, target, log_sum, d_statistics)


def gradient_(logits: Tensor, target: Tensor, log_sum: Tensor, d_statistics: Tensor) -> Tensor:
    """Overwrite the logits [N, C] by their gradient softmax * d[0] + onehot * d[1] + d[2], and return them. d is
    `d_statistics` [3, N], the gradients of each row's log-sum-exp, target's logit and sum of logits. `target` [N] is
    the target's column, -1 if in another shard or ignored; `log_sum` [N] is the log-sum-exp over all classes.
    """
    if in_triton(logits):
        from slapo_zoo.kernels.loss import cross_entropy_triton

        with torch.cuda.device_of(logits):  # of an operator, or of an autograd function
            return cross_entropy_triton.gradient_(logits, target, log_sum, d_statistics)
    return _gradient_into(logits, logits, target, log_sum, d_statistics)


def _gradient_into(
    out: Tensor, logits: Tensor, target: Tensor, log_sum: Tensor, d_statistics: Tensor
) -> Tensor:
    """Write the gradient of the logits, softmax * d[0] + onehot * d[1] + d[2], to `out` [N, C], which may be `logits`,
    in torch; return `out`. d is `d_statistics` [3, N], the gradients of each row's log-sum-exp, target's logit and sum
    of logits. `target` [N] is the target's column (-1: none), `log_sum` [N] the log-sum-exp over all classes.
    """
    if not logits.shape[1]:
        return out
    d, at = d_statistics[:, :, None], target.clamp(min=0)[:, None]
    d_picked = d[1].masked_fill(target[:, None] < 0, 0.0)
    on_device = logits.device.type != "cpu"  # reading a number from a GPU would wait for it
    smoothed = on_device or bool(d[2].any())
    for part in row_blocks(logits):
        into = out[part] if out.dtype == wide_dtype(out) else None
        wide = torch.sub(logits[part].to(wide_dtype(out)), log_sum[part, None], out=into)
        wide.exp_().mul_(d[0, part])
        if smoothed:
            wide.add_(d[2, part])
        wide.scatter_add_(1, at[part], d_picked[part])
        if into is None:
            out[part].copy_(wide)
    return out


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for accumulation: fp64 for an fp64 tensor, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def chunk_rows(x: Tensor, columns: int, chunk_bytes: int | None = None) -> int:
    """Return how many rows of the hidden states x to take at a time, so that their logits [rows, columns] fit into
    `chunk_bytes`; at least 64 rows on a CPU and 2048 on a GPU.

    `chunk_bytes` None is 1 GiB on a GPU: every chunk reads and writes the weight's gradient once, which with many
    small chunks takes longer than the GEMMs. On a CPU it is 128 MiB for fp32, where BLAS adds to the gradient as it
    multiplies, else 512 MiB.
    """
    on_cpu = x.device.type == "cpu"
    size = (x.dtype if on_cpu else wide_dtype(x)).itemsize
    if chunk_bytes is None:
        chunk_bytes = 1 << ((27 if x.dtype == wide_dtype(x) else 29) if on_cpu else 30)
    least = 64 if on_cpu else 2048
    rows = chunk_bytes // max(columns * size, 1)
    return max(rows // 64 * 64, least)


def to_autocast_dtype(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors cast to autocast's dtype, as F.linear would cast them; unchanged outside of autocast."""
    if not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if t is None else t.to(dtype) for t in (x, *others))
