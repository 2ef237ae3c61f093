"""Decide whether a kernel or torch's operations run for an input width on a device: by timings, or by an estimate.

`runs_triton` decides in each call of a kernel. On a GPU without timings only the kernels in PRIOR run, which do less
work than torch's operations. Which modules a kernel can replace is decided in slapo_zoo.zoo.kernels_for_modules.
"""

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import Kernel
from slapo_zoo.dispatch.tables import UNMEASURED, Table, capability, changes, table_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs on the CPU, slowly
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # sums are in fp32, so no fp64
KEPT = 0.98  # least ratio of the best alternative's time to the kernel's
FAR = 2.0  # powers of two between a measured size and one that is decided by it
OLDEST = (7, 0)  # compute capability that Triton serves
# Kernel -> why it is faster on any GPU without being timed.
PRIOR = {
    "sparse_mlm_head_loss": "rows without a label do not pass the head",
    "unpadded_encoder": "padding does not pass the layers",
    "linear_cross_entropy": "logits of a whole batch are never kept",
}


@dataclass(frozen=True)
class Decision:
    """Decision whether a kernel (`runs` is True) or torch's operations run on a device, with the reason as text."""

    runs: bool
    reason: str


def decide(name: str, dtype: str, size: int, device: str) -> Decision:
    """Decide whether the kernel `name`, and not torch's operations, runs for an input of `dtype` ("bfloat16", ...) with
    a last axis (for attention the head dim) of `size` elements on `device` ("cpu", or a GPU's name), and say why.
    """
    table, size = table_of(device), 1 << (max(size, 1) - 1).bit_length()
    start = f"{name}:{dtype}:"
    rows = {int(key[len(start) :]): key for key in table.dispatch if key.startswith(start)}
    if not rows:
        return _estimated(name, dtype, device)
    places = sorted(rows, key=lambda known: abs(math.log2(known / size)))
    nearest, away = places[0], abs(math.log2(places[0] / size))
    if away > FAR and device != "cpu":
        return Decision(False, f"{UNMEASURED} on {device} near a size of {size}")
    key = rows[nearest]
    whose = device if table.device in (device, "") else f"{table.device}, the same capability"
    between = _between(sorted(rows), size)
    if between is not None:
        ratio = _interpolated(table, rows, between, size)
        if not math.isnan(ratio):
            said = f"the best alternative takes about {ratio:.2f} times as long"
            sizes = f"between {rows[between[0]]} and {between[1]} on {whose}"
            return Decision(ratio >= KEPT and _any(table, rows, between), f"{said} ({sizes})")
    ratio = table.ratios.get(key, math.nan)
    said = f"the best alternative takes {ratio:.2f} times as long ({key} on {whose})"
    return Decision(table.dispatch[key] != "torch", said)


def _any(table: Table, rows: Mapping[int, str], between: tuple[int, int]) -> bool:
    return any(table.dispatch[rows[size]] != "torch" for size in between)


def _between(known: list[int], size: int) -> tuple[int, int] | None:
    """Return the nearest measured widths (`known`) below and above `size`; None if `size` is measured or beyond all."""
    below, above = [n for n in known if n < size], [n for n in known if n > size]
    return (below[-1], above[0]) if below and above and size not in known else None


def _interpolated(
    table: Table, rows: Mapping[int, str], between: tuple[int, int], size: int
) -> float:
    """Return the ratio (time of the best alternative) / (time of the kernel) at the input width `size`, interpolated
    logarithmically between the two nearest measured widths `between`; NaN if `table` has no ratio for one of these.
    `rows` maps a measured width to its key in `table`.
    """
    low, high = (table.ratios.get(rows[n], math.nan) for n in between)
    share = math.log2(size / between[0]) / math.log2(between[1] / between[0])
    return low ** (1 - share) * high**share if low > 0 and high > 0 else math.nan


def _estimated(name: str, dtype: str, device: str) -> Decision:
    known = capability(device)
    recent = known and tuple(int(n) for n in known.split(".")) >= OLDEST
    if name in PRIOR and recent:
        return Decision(True, f"estimated: {PRIOR[name]} (nothing was measured on {device})")
    return Decision(False, f"{UNMEASURED} on {device} in {dtype}")


def falls_back(kernel: Kernel, dtype: torch.dtype, size: int, device: str) -> str:
    """Return why the kernel's Triton code cannot run for an input of `dtype` with a last axis of `size` elements on a
    GPU, so that torch's operations run; "" if it can, and for `device` "cpu".
    """
    if device == "cpu":
        return ""
    if not HAS_TRITON:
        return "Triton is not installed"
    if dtype not in TRITON_DTYPES:
        return f"{str(dtype)[6:]} has no Triton kernel"
    return kernel.limits(torch.empty(1, size, dtype=dtype, device="meta"))


def implementation(kernel: Kernel, device: str) -> tuple[str, str]:
    """Return (implementation, reason): what computes the kernel on a device ("cpu", or a GPU's name), and why. The
    implementation is "triton", "torch" or, on a CPU, the names of what runs there, e.g. "F.gelu, mul".
    """
    if device == "cpu":
        return kernel.paths.get("cpu", "torch"), "the best of what runs on a CPU"
    if not any(key.startswith(f"{kernel.name}:") for key in table_of(device).dispatch):
        return "torch", f"{UNMEASURED} on {device}"
    return "triton", "where it was measured not to be slower"


_forced: list[str] = []


@contextmanager
def force(path: str) -> Iterator[None]:
    """Context in which GPUs run kernels by `path`, "triton" or "torch", whatever was measured (tests, benchmarks)."""
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def runs_triton(name: str, x: Tensor) -> bool:
    """Return whether the Triton code of the kernel `name` runs for the input `x`, by measurements on the device of `x`."""
    if x.dtype not in TRITON_DTYPES or not HAS_TRITON:
        return False
    if INTERPRETED or x.device.type == "cpu":
        return INTERPRETED
    if _forced:
        return _forced[-1] == "triton"
    return _timed(name, str(x.dtype)[6:], index(x.shape[-1]), x.device)


def _timed(name: str, dtype: str, size: int, device: torch.device) -> bool:
    """Return whether kernel `name` runs in Triton for `dtype`, last axis `size` and `device`, by timings stored earlier
    for this device; False if there are none.
    """
    known = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _decided(name, dtype, size, known, changes())


# Compilers can trace neither the name of a GPU nor files of timings. This is what torch.compiler.assume_constant_result
# does, which would import the compiler here, for seconds.
vars(_timed)["_dynamo_marked_constant"] = True


@lru_cache(maxsize=1024)
def _decided(name: str, dtype: str, size: int, device: str, tables: int) -> bool:
    """Return whether the Triton code of kernel `name` runs for a dtype, last axis `size` and device, by the stored
    timings; False if there are none for this kernel and device. The result is cached; `tables`, the number of changes
    of the stored timings so far, only makes the cache miss after a change.
    """
    known = any(key.startswith(f"{name}:") for key in table_of(device).dispatch)
    return known and decide(name, dtype, size, device).runs


def in_triton(x: Tensor) -> bool:
    """Return whether Triton can compute on the tensor `x`: Triton is installed, and serves the dtype and device of `x`."""
    return HAS_TRITON and x.dtype in TRITON_DTYPES and (x.is_cuda or INTERPRETED)
