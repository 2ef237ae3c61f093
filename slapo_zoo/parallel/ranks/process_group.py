"""Process group that a launcher prepared: join it, leave it safely, and publish errors to the peers.

Without this, peers of a rank that raises would wait for a timeout, or see gloo's "Connection closed by
peer". So the rank first writes its error into the store of the process group, and `rank_guard` raises that
error on a peer that lost the connection.
"""

import atexit
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from slapo_zoo.errors import MeshError, RankError, SlapoError, is_agreed
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.begun import EXPLAIN
from slapo_zoo.parallel.ranks import background, heartbeat
from slapo_zoo.parallel.ranks.heartbeat import ERROR_KEY
from slapo_zoo.parallel.ranks.slurm import slurm_environment
from slapo_zoo.parallel.ranks.store import fresh_store, is_restartable, meet, open_store

TIMEOUT_S = 60.0  # timeout of a collective; torch's default is 30 minutes
START_S = 600.0  # seconds until all processes of a job have started
JOIN_S = 10.0  # seconds until they have connected to each other
VARIABLE = "SLAPO_ZOO_TIMEOUT_S"
ERROR_WAIT_S = 5.0  # a rank that lost a peer waits so long for a published error
LINGER_S = 10.0  # a failed rank 0 that holds the store lets peers read the error for so long
OF_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LOST_PEER = re.compile(
    r"gloo|nccl|closed by peer|connection (closed|reset|refused)|broken pipe|timed out waiting",
    re.IGNORECASE,
)


SILENT_S = 4.0  # after a lost connection, a rank without a heartbeat for so long is named
_TIMED_OUT = re.compile(r"[Tt]imed out waiting (\d+) ?ms")


_WITHIN: ContextVar[str] = ContextVar("within", default="a collective")  # default in a new thread


class _State:
    failed = False  # after a failure the peers may be gone: leave without a barrier


def is_distributed_launch() -> bool:
    """Return whether torchrun, the deepspeed launcher, srun or `run_local` started this process."""
    return os.environ.keys() >= OF_TORCHRUN or bool(slurm_environment())


def world_size_of_launch() -> int:
    """Return the number of processes that the launcher has written into the environment; 1 without a launcher."""
    found = os.environ if os.environ.keys() >= OF_TORCHRUN else slurm_environment()
    return int(found.get("WORLD_SIZE", "1"))


def timeout_of(timeout_s: float | None) -> float:
    """Return the seconds that a collective may wait: the argument, else SLAPO_ZOO_TIMEOUT_S, else 60."""
    if timeout_s is None:
        text = os.environ.get(VARIABLE, str(TIMEOUT_S))
        try:
            timeout_s = float(text)
        except ValueError:
            problem = f"found {text!r:.40}, expected seconds"
            hint = "set a number of seconds, e.g. 300"
            raise MeshError("init_distributed", VARIABLE, problem, hint) from None
    if not 0 < timeout_s < 1e8:
        problem = f"found {timeout_s}, expected seconds above 0"
        raise MeshError(
            "init_distributed", "timeout_s", problem, f"pass a number of seconds, or set {VARIABLE}"
        )
    return timeout_s


def init_distributed(timeout_s: float | None = None, device: str | None = None) -> bool:
    """Join the process group that the environment describes; return whether there is one.

    Args:
        timeout_s: seconds after which a waiting collective raises; None takes SLAPO_ZOO_TIMEOUT_S, or
            60. Steps in which one rank works alone may take an hour.
        device: "cpu" takes gloo even if CUDA devices are free; "cuda" requires CUDA devices.
    """
    if dist.is_initialized() or not is_distributed_launch():
        return dist.is_initialized()
    if not os.environ.keys() >= OF_TORCHRUN:
        os.environ.update(slurm_environment())
    os.environ.setdefault("LOCAL_RANK", "0")
    cuda = _cuda_device() if device != "cpu" else None
    if cuda is not None:
        torch.cuda.set_device(cuda)
    elif device == "cuda":
        problem = f"found {torch.cuda.device_count()} CUDA devices, expected one per local rank"
        hint = "start fewer ranks here, or pass device='cpu'"
        raise MeshError(f"rank {os.environ['RANK']}", "device='cuda'", problem, hint)
    backend = "gloo" if cuda is None else "nccl"
    start_s = START_S if timeout_s is None else timeout_s
    timeout = timedelta(seconds=timeout_of(timeout_s))
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = (fresh_store if is_restartable() else open_store)(rank, size, start_s)
        meet(store, rank, size, start_s)
        join_group(store, rank, size, backend=backend, timeout=timeout, device_id=cuda)
    except dist.DistError as exc:
        where = f"rank {os.environ['RANK']}"
        address = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
        hint = "check that rank 0 runs and can be reached at this address"
        raise MeshError(where, address, str(exc), hint) from exc
    heartbeat.current()
    atexit.register(lambda: shutdown_distributed(failed=hasattr(sys, "last_value")))
    return True


def join_group(store: Any, rank: int, size: int, **options: Any) -> None:
    """Create the default process group, and return when every rank has joined; try twice if a peer was lost.

    A rank that returned earlier could fail and close connections that other ranks still open. `store` is the
    key-value store through which ranks connect, `options` are those of init_process_group.
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
    """Report through the store that this rank has joined (`is_one`) or failed, and wait for the
    reports of all `size` ranks.

    Returns False if any rank reports a failure, True otherwise, at the latest after JOIN_S seconds.
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


def _cuda_device() -> torch.device | None:
    """Return this rank's CUDA device; None if the machine has fewer devices than local ranks."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if not torch.cuda.is_available() or torch.cuda.device_count() < local_ranks:
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def shutdown_distributed(failed: bool = False) -> None:
    """Wait for the peers, then destroy the process group; with `failed`, do not wait."""
    if not dist.is_initialized():
        return
    if not (failed or _State.failed):
        background.join()  # a running save uses its groups
        with suppress(RuntimeError):  # a missing peer is no error at shutdown
            dist.barrier()
    heartbeat.stop()
    dist.destroy_process_group()
    _State.failed = False


def rank_error(rank: int, exc: BaseException, what: str) -> RankError:
    """Return the RankError that other ranks and the parent process raise after `exc` was raised on `rank` in step `what`."""
    if isinstance(exc, RankError):
        return exc
    problem, hint = (
        f"{type(exc).__name__}: {exc}",
        "this rank failed first; the others were stopped",
    )
    if isinstance(exc, SlapoError):
        parts = [str(part) for part in (exc.where, exc.what, exc.problem) if str(part)]
        problem, hint = f"{type(exc).__name__}: {': '.join(parts)}", exc.hint
    error = RankError(f"rank {rank}", what, problem, hint)
    error.traceback_text = "".join(traceback.format_exception(exc))
    return error


def publish_error(exc: BaseException, what: str = "") -> None:
    """Write this rank's error `exc`, raised in step `what`, into the store, unless one is there."""
    store = default_store()
    if store is None:
        return
    error = rank_error(dist.get_rank(), exc, what)
    parts = [error.where, str(error.what), error.problem, error.hint, error.traceback_text]
    with suppress(RuntimeError):  # the store may have died with rank 0
        store.compare_set(ERROR_KEY, "", json.dumps(parts))
    _linger()


def peer_error() -> RankError | None:
    """Return the first error that a rank of this process group published, or None."""
    store, heart = default_store(), heartbeat.current()
    text = heart.error if heart is not None else ""
    with suppress(RuntimeError):
        if not text and store is not None and store.check([ERROR_KEY]):
            text = store.get(ERROR_KEY)
    return heartbeat.parse_error(text) if text else None


@contextmanager
def rank_guard(what: str) -> Iterator[None]:
    """Context of the step named `what` that publishes an error to the peers. An error that came
    from a lost peer is replaced by that peer's own error.
    """
    token = _WITHIN.set(what)
    try:
        yield
    except Exception as exc:
        if isinstance(exc, RankError) or is_agreed(exc) or not dist.is_initialized():
            raise  # published by an inner guard, or raised by every rank in this step
        explain_lost_peer(exc)
        _State.failed = True
        publish_error(exc, what)
        raise
    finally:
        _WITHIN.reset(token)


def explain_lost_peer(exc: Exception) -> None:
    """If `exc` was raised because a peer was lost, raise the RankError of that peer; otherwise return."""
    if not (dist.is_initialized() and is_lost_peer(exc)):
        return
    _State.failed, what = True, _WITHIN.get()
    error = _await_peer_error()
    if error is None:
        error = lost_peer(exc, what)
        publish_error(error, what)  # so that all remaining ranks raise the same error
    else:
        _linger()
    raise error from exc


EXPLAIN.append(explain_lost_peer)


def is_lost_peer(exc: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, comes from a collective that lost a peer."""
    seen: set[int] = set()  # causes may form a circle
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        if isinstance(exc, dist.DistError) or (
            isinstance(exc, RuntimeError) and _LOST_PEER.search(str(exc))
        ):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def lost_peer(exc: BaseException, what: str) -> RankError:
    """Return a RankError that names the ranks without a heartbeat, after a connection broke or
    timed out. `exc` is the error of the collective, `what` the step in which it ran.
    """
    silent, heart = heartbeat.silent_ranks(SILENT_S), heartbeat.current()
    text, who = (
        str(exc).partition("\n")[0],
        heartbeat.names_of(silent) if silent else "another rank",
    )
    problem = f"lost contact with {who}, which left no message ({text})"
    if found := _TIMED_OUT.search(text):
        seconds = int(found[1]) / 1000
        problem = f"timed out after {seconds:g} s waiting for {who} at {what}"
        problem += f" ({lines})" if (lines := heart.lines() if heart else "") else ""
    if silent:
        problem += f"; {who} is not heard of any more"
    hint = f"see the output of the other ranks; {VARIABLE} or timeout_s= allow more time"
    return RankError(f"rank {dist.get_rank()}", what, problem, hint)


def _await_peer_error() -> RankError | None:
    deadline = time.monotonic() + ERROR_WAIT_S
    while (error := peer_error()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return error


def _linger() -> None:
    """Keep rank 0 alive until its peers have read the error, if rank 0 holds the store.

    If torchrun or run_local holds the store, do not wait.
    """
    if dist.get_rank() != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    heart, deadline = heartbeat.current(), time.monotonic() + LINGER_S
    if heart is None:
        time.sleep(2.0)
        return
    while heart.not_told() and time.monotonic() < deadline:
        time.sleep(0.1)


def default_store() -> Any | None:
    """Return the store of the default process group, or None; torch has no public name for it."""
    if not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
