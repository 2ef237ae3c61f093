"""Matrix products in 16 bits on a GPU, in pieces whose sizes are multiples of 8.

cuBLAS takes kernels that load single elements, which run at a quarter of the speed, if a contiguous axis has another
length, as a vocabulary of 50257 classes has. The rest of such an axis, up to 7 elements, is a product of its own.
"""

import torch
from torch import Tensor

LANES = 8  # elements of 16 bits in one load
DTYPES = (torch.float16, torch.bfloat16)


def suits(a: Tensor, b: Tensor) -> bool:
    """Return whether `mm_into` computes a @ b faster than torch.mm does: on a GPU, in 16 bits, with an unaligned size."""
    return a.is_cuda and a.dtype in DTYPES and any(size % LANES for size in (*a.shape, b.shape[1]))


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a [M, K] @ b [K, N] into `out` [M, N], and return `out`. Leading dimensions should be multiples of 8."""
    (M, K), N = a.shape, b.shape[1]
    in_rows = _parts(M, a.stride(0) == 1)
    in_columns = _parts(N, b.stride(1) == 1 or out.stride(1) == 1)
    whole, *rest = _parts(K, a.stride(1) == 1 or b.stride(0) == 1)
    for rows in in_rows:
        for columns in in_columns:
            part = out[rows, columns]
            for k in rest:  # first, so that the sum with the larger product is rounded once
                torch.mm(a[rows, k], b[k, columns], out=part)
            if rest:
                part.addmm_(a[rows, whole], b[whole, columns])
            else:
                torch.mm(a[rows, whole], b[whole, columns], out=part)
    return out


def _parts(size: int, is_contiguous: bool) -> list[slice]:
    """Return slices that cover an axis of `size` elements. An axis that is contiguous in memory and above 8, but no
    multiple of 8, has two: the largest multiple of 8, and the rest. Any other axis has one.
    """
    whole = size // LANES * LANES
    if not is_contiguous or whole in (0, size):
        return [slice(0, size)]
    return [slice(0, whole), slice(whole, size)]
