"""Matrix products in fp32 on a CPU, computed by oneDNN where that is faster than torch's BLAS.

On AMD CPUs MKL runs AVX2 code, while oneDNN uses AVX-512 and takes half of the time (measured:
docs/training_steps.md). The rounding errors of both are of the same size. Operands are a [M, K] and b [K, N].
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch import gpu_matmul

LEAST = 1 << 22  # multiplications below which a call of oneDNN costs more than it saves
NARROW = 8  # smallest size; below it the product is bound by memory
LARGE = 1 << 24  # elements; larger operands are copied piece by piece
BLOCK = 1 << 21  # elements of a result computed at a time
# CPU features by torch's names (none before 2.11); read at import, since compilers cannot trace it.
CPU: dict[str, Any] = dict(getattr(torch.cpu, "get_capabilities", dict)())
CPU["mkl"] = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
AS_CLASS: set[Any] = set()  # forwards of kernels that compute what Linear and Conv1D do


def is_faster_here() -> bool:
    """Return whether oneDNN beats torch's BLAS here: True on AMD CPUs with AVX-512 and a torch that uses MKL."""
    return bool(CPU["mkl"] and CPU.get("avx512_f")) and "AMD" in str(CPU.get("cpu_name"))


def suits(a: Tensor, b: Tensor, rows: int | None = None) -> bool:
    """Return whether oneDNN computes `a @ b`, a [..., K] and b [K, N], faster than torch's BLAS. For an `a` that is no
    matrix the caller must pass `rows`, the number of rows of `a` flattened to [rows, K].
    """
    wide = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    sizes = (a.shape[0] if rows is None else rows, a.shape[-1], b.shape[1])
    return wide and is_faster_here() and min(sizes) >= NARROW and math.prod(sizes) >= LEAST


def computes_as_class(forward: Any) -> bool:
    """Return whether `forward`, set on a Linear or Conv1D module (None: not set), computes as the class's forward."""
    return forward is None or getattr(forward, "__func__", None) in AS_CLASS


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a [M, K] @ b [K, N] + bias, by the faster of oneDNN and torch's BLAS; oneDNN has no gradient."""
    if suits(a, b):
        if bias is None and a.numel() >= LARGE and not a.is_contiguous():
            return mm_into(a.new_empty((a.shape[0], b.shape[1])), a, b)  # avoids a copy of a
        return _onednn(a, b, bias)
    if bias is None and gpu_matmul.suits(a, b):
        return gpu_matmul.mm_into(a.new_empty((a.shape[0], b.shape[1])), a, b)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b into `out` [M, N] without a temporary of that size, and return `out`."""
    if not suits(a, b):
        return gpu_matmul.mm_into(out, a, b) if gpu_matmul.suits(a, b) else torch.mm(a, b, out=out)
    if b.is_contiguous():  # slices of its columns would not be contiguous
        for part in _blocks(a.shape[0], b.shape[1]):
            out[part] = _onednn(a[part], b)
        return out
    for part in _blocks(b.shape[1], a.shape[0]):
        out[:, part] = _onednn(a, b[:, part])
    return out


def add_mm_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `total` [M, N] in place, without a temporary of that size, and return `total`."""
    if not suits(a, b):
        return total.addmm_(a, b)
    for part in _blocks(a.shape[0], b.shape[1]):
        total[part] += _onednn(a[part], b)
    return total


def _blocks(length: int, width: int) -> Iterator[slice]:
    step = max(BLOCK // max(width, 1), 1)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a @ b + bias by oneDNN's linear operator, which torch.compile uses too but is not public. Non-contiguous
    operands are copied first, because oneDNN is a hundred times slower on them and ignores the strides of a bias.
    """
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b).t(), bias, "none", [], "")


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()
