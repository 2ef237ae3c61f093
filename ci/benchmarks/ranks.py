"""Runs on new processes, so that memory which an earlier run left in an allocator does not hide a peak."""

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
    """Run `fn(*args)` on `nprocs` new processes of one thread each; return the results by rank.

    The processes are forked from this one, which has imported everything: neither memory nor time of imports is
    counted.
    """
    import_all()
    give_back()
    return run_local(fn, nprocs, args, timeout=500, start="fork", threads=1, device="cpu")


def import_all() -> None:
    """Import all modules that loading a model needs."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from slapo_zoo.model.load.auto import AutoScheduledModel  # noqa: F401
    from slapo_zoo.zoo.table import families

    families()


def readinto_floor(bytes_wanted: int, folder: Path) -> None:
    """Read `bytes_wanted` bytes of a folder's safetensors files into fresh memory with `readinto`."""
    target, done = torch.empty(bytes_wanted, dtype=torch.uint8).numpy().data, 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while done < bytes_wanted and (count := _readinto(file, target[done:])):
                done += count


def _readinto(file: Any, target: Any) -> int:
    return file.readinto(target[: 64 << 20])


def barrier() -> None:
    """Wait for all ranks, so that they start together and share the memory bus equally; do nothing without ranks."""
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
    """Call `action` on all ranks at the same time; return its result and its cost on this rank."""
    barrier()
    with AnonymousPeak() as peak:
        begin, cpu = time.perf_counter(), time.process_time()
        result = action()
        seconds = time.perf_counter() - begin, time.process_time() - cpu
    return result, Cost(*seconds, peak.growth)


def best(found: dict[str, Any], **values: float) -> None:
    """Lower each value in `found` to the given one of the same name: other work on the machine only adds to a time."""
    for name, value in values.items():
        found[name] = min(found.get(name, value), value)


def give_back() -> None:
    """Return freed memory to the operating system, so that the next measurement must allocate it again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def touch_memory(part: float = 0.75) -> None:
    """Write once to the share `part` of the free memory, in a process that then ends.

    A virtual machine gets memory from its host when a page is first written, which would slow the first measurement.
    """
    run_local(_touch, 1, (part,), timeout=500, start="fork", threads=1, device="cpu")


def _touch(part: float) -> None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        torch.empty(int(free * part), dtype=torch.uint8).fill_(1)
