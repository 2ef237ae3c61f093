"""Triton part of cross_entropy.py: one row per program, in blocks of columns; online softmax."""

# pyright: reportCallIssue=false, reportArgumentType=false
# A launch takes options that the signature of the kernel has not, and plain numbers as constants.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _statistics_kernel(out, logits, target, N, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * C
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)  # per lane: one reduction at the end
    sums = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, C, BLOCK):
        n = first + tl.arange(0, BLOCK)
        x = tl.load(start + n, mask=n < C, other=float("-inf")).to(tl.float32)
        new = tl.maximum(highest, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp(highest - safe) + tl.exp(x - safe)
        plain += tl.where(n < C, x, 0.0)
        highest = new
    top = tl.max(highest, 0)
    total = tl.sum(sums * tl.exp(highest - top), 0)
    at = tl.load(target + row)
    picked = tl.load(start + tl.maximum(at, 0)).to(tl.float32)
    tl.store(out + row, top + tl.log(total))
    tl.store(out + N + row, tl.where(at < 0, 0.0, picked))
    tl.store(out + 2 * N + row, tl.sum(plain, 0))


@triton.jit
def _gradient_kernel(out, logits, target, log_sum, d_statistics, N, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.load(target + row)
    log_total = tl.load(log_sum + row)
    d_sum = tl.load(d_statistics + row)
    d_picked = tl.load(d_statistics + N + row)
    d_total = tl.load(d_statistics + 2 * N + row)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = row.to(tl.int64) * C + n
    x = tl.load(logits + where, mask=n < C, other=0.0).to(tl.float32)
    g = tl.exp(x - log_total) * d_sum + tl.where(n == at, d_picked, 0.0) + d_total
    tl.store(out + where, g, mask=n < C)


def statistics(logits: Tensor, target: Tensor) -> Tensor:
    """The arguments of cross_entropy.py."""
    N, C = logits.shape
    out = logits.new_empty((3, N), dtype=torch.float32)
    if not C:
        out.zero_()[0] = -torch.inf
    elif N:
        block = min(BLOCK, triton.next_power_of_2(C))
        _statistics_kernel[(N,)](
            out, logits, target.contiguous(), N, C, BLOCK=block, num_warps=8, enable_fp_fusion=True
        )
    return out


def gradient_(logits: Tensor, target: Tensor, log_sum: Tensor, d_statistics: Tensor) -> Tensor:
    """The arguments of cross_entropy.py; contiguous logits become their gradient."""
    N, C = logits.shape
    if N and C:
        block = min(BLOCK, triton.next_power_of_2(C))
        args = (target.contiguous(), log_sum.contiguous(), d_statistics.contiguous())
        _gradient_kernel[(N, triton.cdiv(C, block))](
            logits, logits, *args, N, C, BLOCK=block, num_warps=8, enable_fp_fusion=True
        )
    return logits


_TYPES = {"logits": "*bf16", "out": "*bf16", "target": "*i64", "log_sum": "*fp32",
          "d_statistics": "*fp32", "N": "i32", "C": "i32"}  # fmt: skip
AOT = [
    (
        _statistics_kernel,
        _TYPES | {"out": "*fp32"},
        {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": True},
    ),
    (_gradient_kernel, _TYPES, {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": True}),
]
