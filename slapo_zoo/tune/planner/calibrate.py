"""Measure the hardware profile of this machine: rates of matrix products, memory, links, each the best of repeats."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.parallel.gradient_buckets import BUCKET_BYTES
from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.tune.planner.hardware import CPU_SCRATCH, GIB, Hardware

SIZE, ELEMENTS, REPEATS = 1024, 1 << 22, 7


def measure(device: str | None, ranks: int = 2) -> Hardware:
    """Measure the speeds of this machine and return them as the hardware profile that the planner simulates with.

    Args:
        device: "cpu", "cuda", or None for a GPU where there is one.
        ranks: local processes that all-reduce a tensor to measure the link; 1 skips that measurement.
    """
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = on.type == "cuda"
    rates = {name: matmul_rate(on, getattr(torch, name)) for name in ("float32", "bfloat16")}
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(on) if cuda else f"CPU, {threads} threads"
    memory = torch.cuda.get_device_properties(on).total_memory if cuda else host_memory()
    per_node = torch.cuda.device_count() if cuda else max(1, (os.cpu_count() or 1) // threads)
    link = run_local(sum_rate, ranks, (on.type,), timeout=120, device=on.type)[0] if ranks > 1 else 1e9  # fmt: skip
    return Hardware(
        name, f"measured with torch {torch.__version__}", rates, copy_rate(on), launch_time(on), link,
        link, per_node=per_node, memory=float(memory), reserved=1.5 * GIB if cuda else 5 * 2**20,
        foreach=cuda, scratch=0.0 if cuda else CPU_SCRATCH,
    )  # fmt: skip


def best_time(run: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the seconds of the fastest of `repeats` calls of `run`, after one to warm up; each call waits for the GPU."""
    found = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure a square matrix product and return its floating-point operations per second."""
    size = SIZE if device.type == "cpu" else 8 * SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / best_time(lambda: a @ b, device)


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second that the addition of two large tensors reads and writes, measured on `device`."""
    count = ELEMENTS if device.type == "cpu" else 32 * ELEMENTS
    a, b = (torch.randn(count, device=device) for _ in range(2))
    return 3.0 * a.nbytes / best_time(lambda: torch.add(a, b), device)


def launch_time(device: torch.device, count: int = 200) -> float:
    """Return the mean seconds of `count` additions to a tensor of 8 elements: the overhead of one operation."""
    x = torch.ones(8, device=device)

    def many() -> None:
        y = x
        for _ in range(count):
            y = y + 1.0

    return best_time(many, device) / count


def host_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sum_rate(device: str) -> float:
    """Time an all-reduce on `device` that all ranks enter; return the bytes per second that each rank sends."""
    on = torch.empty(0, device=device).device
    x = torch.ones(BUCKET_BYTES // 4, device=on)
    seconds = best_time(lambda: dist.all_reduce(x), on, 3)
    n = dist.get_world_size()
    return 2.0 * BUCKET_BYTES * (n - 1) / n / seconds
