"""Triton kernel of dropout.py, and the hash by which all Triton kernels here drop elements.

The hash is bit for bit that of slapo_zoo.parallel.rng.device_seeds.is_kept. Each program handles one block of
elements of one batch row.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Launches pass options that are not in the kernel's signature, and numbers for constexpr.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # 16 elements per thread


@triton.jit
def scaled_keep(counter, key, threshold, scale):
    """Return `scale` where the hash of (index `counter`, seed `key`) reaches `threshold`, else 0."""
    bits = counter.to(tl.int64) * 0x2545F4914F6CDD1D + key
    bits = (bits ^ ((bits >> 31) & 0x1FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 31) & 0x1FFFFFFFF)) * -0x6B2FB644ECCEEE15
    bits = (bits >> 40) & 0xFFFFFF
    return tl.where(bits >= threshold, scale, 0.0)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Return (24-bit hash value below which an element is dropped with probability p, 1 / (1 - p))."""
    return int(p * 0x1000000), 1.0 / (1.0 - p) if p < 1.0 else 1.0


@triton.jit
def mask_of_tile(m, n, ok, M, N, keep, seeds, cell, threshold, scale, MASK: tl.constexpr):
    """Return the dropout factors, 0 or `scale`, of elements (m[i], n[j]) of x [M, N], as a tile. With MASK "keep" they
    are loaded from `keep` [M, N] where the tile `ok` is True (inside x). With "seeds" an element is hashed from the
    seed of its row (there is one in `seeds` for every `cell` rows), and is dropped if the hash is below `threshold`.
    """
    if MASK == "keep":
        at = m[:, None].to(tl.int64) * N + n[None, :]
        found = tl.load(keep + at, mask=ok, other=0.0).to(tl.float32)
    else:  # `else`, since code after a `return` is compiled too, without seeds
        key = tl.load(seeds + m // cell, mask=m < M, other=0)
        counter = (m % cell)[:, None].to(tl.int64) * N + n[None, :]
        found = scaled_keep(counter, key[:, None], threshold, scale)
    return found


def mask_options(M: int, keep: Tensor | None, seeds: Tensor | None, p: float) -> tuple[str, tuple]:
    """Return the arguments (MASK, (cell, threshold, scale)) of `mask_of_tile` for M rows and dropout probability p.
    MASK is "keep", "seeds" or, without dropout, "none"; `cell` is the number of rows per seed.
    """
    mask = "keep" if keep is not None else "seeds" if seeds is not None and p > 0 else "none"
    cell = M // max(len(seeds), 1) if mask == "seeds" else 1
    return mask, (max(cell, 1), *threshold_and_scale(p))


def contiguous(*tensors: Tensor | None) -> list:
    """Return the tensors in contiguous memory; None stays None."""
    return [None if t is None else t.contiguous() for t in tensors]


@triton.jit
def _dropout_kernel(y, x, seeds, size, blocks, threshold, scale, BLOCK: tl.constexpr):
    cell = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = cell.to(tl.int64) * size + i
    kept = scaled_keep(i, tl.load(seeds + cell), threshold, scale)
    tl.store(y + at, tl.load(x + at, mask=i < size, other=0.0).to(tl.float32) * kept, mask=i < size)


def dropped(x: Tensor, seeds: Tensor, p: float) -> Tensor:
    """Launch the dropout kernel on x [B, ...] with one seed per batch row, seeds [B]; return mask * x."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        size = x.numel() // len(seeds)
        block = min(
            BLOCK, max(1 << (size - 1).bit_length(), 128)
        )  # triton.next_power_of_2 takes 13 us
        blocks = -(-size // block)
        args = (y, x, seeds.contiguous(), size, blocks, *threshold_and_scale(p))
        _dropout_kernel[(len(seeds) * blocks,)](
            *args, BLOCK=block, num_warps=4, enable_fp_fusion=True
        )
    return y
