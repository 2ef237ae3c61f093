"""Triton kernels of cross_entropy.py: one row per program, in blocks of columns; online softmax."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Launches pass options that are not in the kernel's signature, and numbers for constexpr.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LANES = tl.constexpr(16)  # columns that one aligned load or store of a thread may span


@triton.jit
def _statistics_kernel(out, logits, target, N, C, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    whole = C // LANES * LANES  # a mask by C would load single columns
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)  # per lane: one reduction at the end
    sums = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, whole, BLOCK):
        n = first + tl.arange(0, BLOCK)
        x = tl.load(start + n, mask=n < whole, other=float("-inf")).to(tl.float32)
        new = tl.maximum(highest, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp(highest - safe) + tl.exp(x - safe)
        plain += tl.where(n < whole, x, 0.0)
        highest = new
    last = whole + tl.arange(0, LANES)
    rest = tl.load(start + last, mask=last < C, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(highest, 0), tl.max(rest, 0))
    top = tl.where(top == float("-inf"), 0.0, top)  # all of this shard is hidden
    total = tl.sum(sums * tl.exp(highest - top), 0) + tl.sum(tl.exp(rest - top), 0)
    at = tl.load(target + row)
    picked = tl.load(start + tl.maximum(at, 0)).to(tl.float32)
    log_sum = top + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(out + row, tl.where(total == 0.0, float("-inf"), log_sum))
    tl.store(out + N + row, tl.where(at < 0, 0.0, picked))
    tl.store(out + 2 * N + row, tl.sum(plain, 0) + tl.sum(tl.where(last < C, rest, 0.0), 0))


@triton.jit
def _gradient_of(x, n, at, log_total, d_sum, d_picked, d_total):
    return tl.exp(x - log_total) * d_sum + tl.where(n == at, d_picked, 0.0) + d_total


@triton.jit
def _gradient_kernel(out, logits, target, log_sum, d_statistics, N, C, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.load(target + row)
    log_total = tl.load(log_sum + row)
    d_sum = tl.load(d_statistics + row)
    d_picked = tl.load(d_statistics + N + row)
    d_total = tl.load(d_statistics + 2 * N + row)
    start = row.to(tl.int64) * stride
    whole = C // LANES * LANES
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + start + n, mask=n < whole, other=0.0).to(tl.float32)
    g = _gradient_of(x, n, at, log_total, d_sum, d_picked, d_total)
    tl.store(out + start + n, g, mask=n < whole)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        last = whole + tl.arange(0, LANES)
        rest = tl.load(logits + start + last, mask=last < C, other=0.0).to(tl.float32)
        rest = _gradient_of(rest, last, at, log_total, d_sum, d_picked, d_total)
        tl.store(out + start + last, rest, mask=last < C)


def statistics(logits: Tensor, target: Tensor) -> Tensor:
    """Launch the statistics kernel for logits [N, C] and target [N] (-1: on another rank). Return [3, N]: the
    log-sum-exp of each row, the logit of its target, the sum of its logits.
    """
    N, C = logits.shape
    out = logits.new_empty((3, N), dtype=torch.float32)
    if not C:
        out.zero_()[0] = -torch.inf
    elif N:
        block = min(BLOCK, triton.next_power_of_2(C))
        _statistics_kernel[(N,)](
            out, logits, target.contiguous(), N, C, logits.stride(0),
            BLOCK=block, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def gradient_(logits: Tensor, target: Tensor, log_sum: Tensor, d_statistics: Tensor) -> Tensor:
    """Overwrite logits [N, C] by their gradient softmax * d[0] + onehot * d[1] + d[2]; return them. d is `d_statistics`
    [3, N], the gradients of each row's log-sum-exp, target's logit and sum of logits. `target` [N] is the target's
    column, -1 if in another shard or ignored; `log_sum` [N] is the log-sum-exp over all classes.
    """
    N, C = logits.shape
    if N and C:
        block = min(BLOCK, triton.next_power_of_2(C))
        args = (target.contiguous(), log_sum.contiguous(), d_statistics.contiguous())
        _gradient_kernel[(N, triton.cdiv(C, block))](
            logits, logits, *args, N, C, logits.stride(0),
            BLOCK=block, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return logits
