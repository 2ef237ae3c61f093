"""Joining and safe leaving of the process group that a launcher has prepared."""

import atexit
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.ranks import background, heartbeat
from slapo_zoo.parallel.ranks.killed_rank import VARIABLE, State, is_lost_peer
from slapo_zoo.parallel.ranks.slurm import slurm_environment
from slapo_zoo.parallel.ranks.store import fresh_store, is_restartable, meet, open_store
from slapo_zoo.parallel.rng.seeds import get_logger

TIMEOUT_S = 60.0  # timeout of a collective over gloo, whose default in torch is 30 minutes
NCCL_TIMEOUT_S = 600.0  # torch's default: past it NCCL ends the processes of all ranks that wait
START_S = 600.0  # seconds until all processes of a job have started
JOIN_S = 10.0  # seconds until they have connected to each other
OF_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def is_distributed_launch() -> bool:
    """Return whether torchrun, the deepspeed launcher, srun or `run_local` started this process."""
    return os.environ.keys() >= OF_TORCHRUN or bool(slurm_environment())


def world_size_of_launch() -> int:
    """Return the number of processes that the launcher has written into the environment; 1 without a launcher."""
    found = os.environ if os.environ.keys() >= OF_TORCHRUN else slurm_environment()
    return int(found.get("WORLD_SIZE", "1"))


def timeout_of(timeout_s: float | None, over_nccl: bool = False) -> float:
    """Return the seconds that a collective may wait: the argument, else SLAPO_ZOO_TIMEOUT_S, else 60 (NCCL: 600)."""
    if timeout_s is None:
        text = os.environ.get(VARIABLE, str(NCCL_TIMEOUT_S if over_nccl else TIMEOUT_S))
        try:
            timeout_s = float(text)
        except ValueError:
            problem = f"found {text!r:.40}, expected seconds"
            hint = "set a number of seconds, e.g. 300"
            raise MeshError("init_distributed", VARIABLE, problem, hint) from None
    if not 0 < timeout_s < 1e8:
        problem = f"found {timeout_s}, expected seconds above 0 and below 1e8"
        hint = f"pass timeout_s=, or set {VARIABLE}, to a number of seconds"
        raise MeshError("init_distributed", "timeout_s", problem, hint)
    return timeout_s


def init_distributed(timeout_s: float | None = None, device: str | None = None) -> bool:
    """Join the process group that the launcher's environment variables describe; return False if there is none.

    Args:
        timeout_s: seconds after which a waiting collective raises; None takes SLAPO_ZOO_TIMEOUT_S, or 60 (600 with
            NCCL). The wait for a rank that works alone (a download, the check of a schedule) ends after an hour only.
        device: "cpu" (gloo) or "cuda" (nccl); None takes "cuda" if every rank has a GPU of its own, else "cpu".
    """
    if dist.is_initialized() or not is_distributed_launch():
        return dist.is_initialized()
    if not os.environ.keys() >= OF_TORCHRUN:
        os.environ.update(slurm_environment())
    start_s = START_S if timeout_s is None else timeout_s
    timeout_of(timeout_s)  # raises before any rank waits
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = (fresh_store if is_restartable() else open_store)(rank, size, start_s)
        meet(store, rank, size, start_s)
        cuda = _own_gpu(store, rank, size) if device != "cpu" else None
        if cuda is None and device == "cuda":
            problem = f"found {torch.cuda.device_count()} CUDA devices, expected one per local rank"
            hint = "start fewer ranks here, or pass device='cpu'"
            raise MeshError(f"rank {rank}", "device='cuda'", problem, hint)
        os.environ.setdefault("LOCAL_RANK", str(cuda.index if cuda else 0))
        backend = "nccl" if cuda else "gloo"
        timeout = timedelta(seconds=timeout_of(timeout_s, cuda is not None))
        join_group(store, rank, size, backend=backend, timeout=timeout, device_id=cuda)
    except dist.DistError as exc:
        where = f"rank {os.environ['RANK']}"
        address = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
        hint = f"start all {os.environ['WORLD_SIZE']} ranks, and check that rank 0 can be reached at this address"
        raise MeshError(where, address, str(exc), hint) from exc
    heartbeat.current()
    atexit.register(lambda: shutdown_distributed(failed=hasattr(sys, "last_value")))
    return True


def join_group(store: Any, rank: int, size: int, **options: Any) -> None:
    """Create the default process group, and return when every rank has joined: a rank that went on earlier could fail
    and close connections that others still open. If any rank lost a peer, all try once more, and then raise. `store` is
    the key-value store through which ranks connect, `options` are those of init_process_group.
    """
    for attempt in (1, 2):
        tried, error = PrefixStore(f"slapo_zoo/start/{attempt}", store), None
        try:
            dist.init_process_group(store=tried, rank=rank, world_size=size, **options)
        except RuntimeError as exc:
            error = exc
            if not is_lost_peer(exc):
                raise
            compat.forget_groups()
        alike = _all_joined(tried, size, error is None)
        if error is not None and (alike or attempt == 2):
            raise error
        if error is None:
            if alike or attempt == 2:
                return
            dist.destroy_process_group()


def _all_joined(store: Any, size: int, is_one: bool) -> bool:
    """Report through the store that this rank has joined (`is_one`) or failed; wait for all `size` ranks' reports.
    Return False if all have reported, some a failure; True if all joined, or if reports are missing after JOIN_S
    seconds.
    """
    store.add("joined" if is_one else "failed", 1)
    deadline, pause = time.monotonic() + JOIN_S, 1e-4
    while time.monotonic() < deadline:
        failed = store.add("failed", 0)
        if store.add("joined", 0) + failed == size:
            return failed == 0
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


def _own_gpu(store: Any, rank: int, size: int) -> torch.device | None:
    """Return this rank's CUDA device, made the current one; None on all ranks unless each has a device of its own. All
    `size` ranks call this function, and tell each other through `store` whether they have one. A launcher shows a rank
    all devices of its machine, or (`srun --gpus-per-task`, Ray) the rank's own devices alone.
    """
    count, has_own = torch.cuda.device_count() if torch.cuda.is_available() else 0, False
    index = int(os.environ.get("LOCAL_RANK", rank)) % max(count, 1)
    if count:
        key = f"slapo_zoo/gpu/{torch.cuda.get_device_properties(index).uuid}"
        has_own = store.compare_set(key, "", str(rank)) == str(rank).encode()
    store.set(f"slapo_zoo/has_gpu/{rank}", str(int(has_own)))
    if b"0" in store.multi_get([f"slapo_zoo/has_gpu/{other}" for other in range(size)]):
        if count and rank == 0:
            text = "found %d CUDA devices here, expected one per local rank: all %d ranks compute on the CPU"
            get_logger("slapo_zoo").warning(text, count, size)
        return None
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def shutdown_distributed(failed: bool = False) -> None:
    """Wait until all ranks call this function, then destroy the process group; after a failure, do not wait."""
    if not dist.is_initialized():
        return
    if not (failed or State.failed):
        background.join()  # a running save uses its groups
        with suppress(RuntimeError):  # a missing peer is no error at shutdown
            dist.barrier()
    heartbeat.stop()
    dist.destroy_process_group()
    State.failed = False
