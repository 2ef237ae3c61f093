"""Local processes as ranks: they are started, and all of them are stopped when one fails."""

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from slapo_zoo.errors import MeshError, RankError
from slapo_zoo.parallel.ranks.killed_rank import is_lost_peer, rank_error, rank_guard
from slapo_zoo.parallel.ranks.process_group import init_distributed, shutdown_distributed
from slapo_zoo.parallel.ranks.store import local_store

BLAME_S = 2.0  # seconds in which the rank that failed first can report, before a rank that lost it is named
GRACE_S = 3.0  # between SIGTERM and SIGKILL
_SIGNAL_HINTS = {
    "SIGKILL": "Linux kills a process so when memory runs out: see dmesg, and use less memory",
    "SIGABRT": "gloo aborts when ranks enter a collective with different shapes: see the output of the rank",
}


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, sent to the parent process.

    Args:
        report: RankError that the other ranks and the parent process raise.
        traceback_text: traceback of the rank.
        error: exception that the rank raised; None if it cannot be pickled.
        secondary: True if the rank only lost a peer, which is to blame.
    """

    report: RankError
    traceback_text: str = ""
    error: BaseException | None = None
    secondary: bool = False


@dataclass(frozen=True)
class LocalRank:
    """Process of a local rank, and the parent process's end of the pipe to it."""

    rank: int
    process: BaseProcess
    pipe: Connection


def run_local(
    fn: Callable[..., Any],
    nprocs: int,
    args: Sequence[Any] = (),
    timeout: float | None = None,
    start: Literal["fork", "spawn"] | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `nprocs` local ranks of one process group; return their results, by rank.

    Args:
        fn: called on every rank; under "spawn" it must be importable.
        nprocs: number of ranks.
        args: arguments, the same on every rank.
        timeout: seconds after which all ranks are stopped; None waits for ever.
        start: "fork" (milliseconds, the default where it is safe) or "spawn".
        threads: CPU threads per rank; None takes an equal share of the cores.
        device: "cpu" (gloo) or "cuda" (nccl); None takes "cuda" if every rank has a GPU of its own, else "cpu".

    Raises:
        RankError: a rank raised or died, and the others were stopped; `traceback_text` is that rank's traceback.
    """
    if nprocs < 1:
        problem = f"found {nprocs}, expected at least 1"
        raise MeshError("run_local", "nprocs", problem, "pass nprocs=1 for one rank")
    what = getattr(fn, "__name__", str(fn))
    ranks: list[LocalRank] = []
    try:
        store = _start_all(ranks, nprocs, start, threads, (device, what, fn, args))
        results, failure = collect(ranks, timeout, what)
        if failure is None:
            _join(ranks, GRACE_S)
    finally:
        stop(ranks)
    del store  # kept until now, because the ranks use it
    if failure is not None:
        failure.report.traceback_text = failure.traceback_text
        raise failure.report from failure.error
    return results


def _start_all(
    ranks: list[LocalRank], nprocs: int, start: str | None, threads: int | None, job: tuple
) -> Any:
    """Start `nprocs` processes and append them to `ranks`; return the store through which they connect.

    Args:
        ranks: list that gets the processes.
        nprocs: number of ranks.
        start: "fork" or "spawn"; None takes "fork" with one thread per rank that cannot use CUDA, else "spawn".
        threads: CPU threads per rank; None takes an equal share of the cores.
        job: (device, name for errors, function, its arguments).
    """
    threads = threads or max(1, (os.cpu_count() or 1) // nprocs)
    # OpenMP's threads do not survive a fork: a child that uses more than one would hang
    # and a fork of a process that has asked CUDA for its devices cannot use them
    cuda = torch.cuda.is_initialized() or (job[0] != "cpu" and torch.cuda.is_available())
    start = start or ("spawn" if threads > 1 or cuda or _autograd_has_threads() else "fork")
    context = multiprocessing.get_context(start)
    for rank in range(nprocs):
        ranks.append(start_rank(context, rank, _rank_main, (rank, nprocs, threads, *job)))
    # created after the forks, since the store has a thread
    store = local_store()
    for local in ranks:
        with suppress(OSError):  # the rank has ended already: `collect` reports it
            local.pipe.send(store.port)
    return store


def _autograd_has_threads() -> bool:
    """Return whether autograd of this process has threads of its own, as after `emulate` with a CUDA build of torch: a
    forked process could run no backward.
    """
    with suppress(OSError):  # a thread that ended, or a system without /proc
        names = [path.read_bytes() for path in Path("/proc/self/task").glob("*/comm")]
        return any(name.startswith(b"pt_autograd") for name in names)
    return False


def rank_environment(rank: int, nprocs: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for `rank` of `nprocs`; the launcher's store is at `port`."""
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": nprocs, "RANK": rank, "WORLD_SIZE": nprocs}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values = local | address | {"TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in values.items()}


def start_rank(
    context: BaseContext, rank: int, main: Callable[..., None], args: tuple[Any, ...]
) -> LocalRank:
    """Start `main(pipe, *args)` in a new process; return that process with the parent's end of the
    pipe. `context` makes processes by fork or spawn; `rank` names the process.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, *args), name=f"rank {rank}", daemon=True)  # type: ignore[attr-defined]
    # a stop signal that `listening` passes on waits until this rank listens to it
    listens = getattr(signal.getsignal(signal.SIGUSR1), "__module__", "").endswith("stop_signals")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1} if listens else ())
    with warnings.catch_warnings():  # a forked rank uses one thread and no lock of the parent
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # so that this end reads EOF when the process ends
    return LocalRank(rank, process, ours)


def prepare_rank(threads: int) -> None:
    """Set up the process of a rank: its number of threads, ignored Ctrl+C, exit when the parent process ends."""
    gc.freeze()  # never free the parent's groups here: they would wait for threads that the fork lacks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl+C too, and stops the ranks
    torch.set_num_threads(threads)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _rank_main(
    pipe: Connection, rank: int, nprocs: int, threads: int, device: str | None, what: str,
    fn: Callable[..., Any], args: Sequence[Any],
) -> None:  # fmt: skip
    prepare_rank(threads)
    os.environ.update(rank_environment(rank, nprocs, pipe.recv()))

    def job() -> Any:
        init_distributed(device=device)
        with rank_guard(what):
            return fn(*args)

    send_outcome(pipe, rank, what, job)
    shutdown_distributed()


def send_outcome(pipe: Connection, rank: int, what: str, job: Callable[[], Any]) -> bool:
    """Run `job` and send its pickled result, or a `Failure`, to the parent through `pipe`; return
    whether `job` succeeded. `what` names the job in errors.
    """
    failure = None
    try:
        # plain pickle: multiprocessing's own would share tensor memory, which ends with this process
        data = pickle.dumps(job())
    except Exception as exc:
        failure = _failure(rank, exc, what)
        data = pickle.dumps(failure)
    pipe.send_bytes(data)
    return failure is None


def _failure(rank: int, exc: Exception, what: str) -> Failure:
    report = rank_error(rank, exc, what)
    secondary = isinstance(exc, RankError) or is_lost_peer(exc)
    error: BaseException | None = exc
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:  # a foreign class's __reduce__ may raise anything
        error = None
    return Failure(report, report.traceback_text, error, secondary)


def collect(
    ranks: list[LocalRank], timeout: float | None, what: str
) -> tuple[list[Any], Failure | None]:
    """Wait for the ranks; return (results by rank, None), or ([], the first cause of failure).

    Args:
        ranks: the processes.
        timeout: seconds after which a rank that still runs counts as failed; None waits for ever.
        what: name of the function that they run, for errors.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    waiting = {local.pipe: local for local in ranks}
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), left)
        if not ready:
            # after a failure, the ranks that still run are late only because of it
            late = _too_late([local.rank for local in waiting.values()], timeout, what)
            failures = failures or [late]
            break
        for local in [waiting.pop(pipe) for pipe in ready]:  # type: ignore[index]
            outcome = _receive(local, what)
            if isinstance(outcome, Failure):
                failures.append(outcome)
                blame = time.monotonic() + BLAME_S
                deadline = blame if deadline is None else min(deadline, blame)
            results[local.rank] = outcome
        if any(not failure.secondary for failure in failures):
            break
    if failures:
        return [], min(failures, key=lambda failure: failure.secondary)
    return [results[local.rank] for local in ranks], None


def _receive(local: LocalRank, what: str) -> Any:
    try:
        return pickle.loads(local.pipe.recv_bytes())
    except (EOFError, OSError):
        local.process.join(GRACE_S)
        code = local.process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else ""
        problem = f"killed by {name}" if name else f"ended with exit code {code} and no result"
        hint = _SIGNAL_HINTS.get(name, "see the output of this rank")
        return Failure(RankError(f"rank {local.rank}", what, problem, hint))


def _too_late(ranks: list[int], timeout: float | None, what: str) -> Failure:
    names = "rank " + ", ".join(map(str, sorted(ranks)))
    hint = "raise the timeout, or look for a rank that waits for the others"
    return Failure(RankError(names, what, f"still running after {timeout} s", hint))


def stop(ranks: list[LocalRank]) -> None:
    """Terminate every rank that still runs, kill it after GRACE_S seconds, and release its resources."""
    for local in ranks:
        local.process.terminate()
    _join(ranks, GRACE_S)
    for local in ranks:
        if local.process.is_alive():
            local.process.kill()
        local.process.join()
        local.process.close()
        local.pipe.close()


def _join(ranks: list[LocalRank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for local in ranks:
        local.process.join(max(0.0, deadline - time.monotonic()))
