"""Measurements on new processes, so that memory left in an allocator by an earlier run hides no peak."""

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.weights.ledger import AnonymousPeak

LAYOUTS = {"tp=2": (2, 1, 1), "tp=4": (4, 1, 1), "pp=2": (1, 2, 1), "tp=2 pp=2": (2, 2, 1)}
MIB = 2**20


def on_ranks(fn: Callable[..., Any], nprocs: int, *args: Any) -> list[Any]:
    """Results of `fn(*args)` on new processes of one thread each.

    They are forked from this one, which has imported everything and holds nothing else: code is
    not counted as memory of a load, and no time goes into importing it again.
    """
    import_all()
    give_back()
    return run_local(fn, nprocs, args, timeout=500, start="fork", threads=1, device="cpu")


def import_all() -> None:
    """Import what a load needs."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from slapo_zoo.load.auto import AutoScheduledModel  # noqa: F401
    from slapo_zoo.zoo.table import families

    families()


def readinto_floor(bytes_wanted: int, folder: Path) -> None:
    """Copy so many bytes of the files into fresh memory with `readinto`."""
    target, done = torch.empty(bytes_wanted, dtype=torch.uint8).numpy().data, 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while done < bytes_wanted and (count := _readinto(file, target[done:])):
                done += count


def _readinto(file: Any, target: Any) -> int:
    return file.readinto(target[: 64 << 20])


def barrier() -> None:
    """Wait for all ranks, so that they start together and share the memory bus equally."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


@dataclass(frozen=True)
class Cost:
    """Cost of an action: wall and CPU seconds, and growth of anonymous memory in bytes."""

    wall: float
    cpu: float
    growth: int


def timed(action: Callable[[], Any]) -> tuple[Any, Cost]:
    """Return the result of an action that all ranks begin together, and its cost."""
    barrier()
    with AnonymousPeak() as peak:
        begin, cpu = time.perf_counter(), time.process_time()
        result = action()
        seconds = time.perf_counter() - begin, time.process_time() - cpu
    return result, Cost(*seconds, peak.growth)


def best(found: dict[str, Any], **values: float) -> None:
    """Keep the least of every value: other work on the machine only ever adds to a time."""
    for name, value in values.items():
        found[name] = min(found.get(name, value), value)


def give_back() -> None:
    """Return freed memory to the kernel, so that the next measurement must fault it in again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def touch_memory(part: float = 0.75) -> None:
    """Write to most of the free memory once, in a process that then ends.

    A virtual machine gets its memory from the host page by page, when it is first written to: a
    file or a tensor that lands there would pay for that, whoever's it is.
    """
    run_local(_touch, 1, (part,), timeout=500, start="fork", threads=1, device="cpu")


def _touch(part: float) -> None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        torch.empty(int(free * part), dtype=torch.uint8).fill_(1)
