"""Emulation of all ranks of a mesh as threads of one process: for notebooks, debuggers and quick checks.

Every thread has its own gloo process groups, so the same collectives run as on many processes, with
the same results.
"""

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.errors import MeshError, RankError
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks import heartbeat
from slapo_zoo.parallel.ranks.process_group import join_group, rank_guard
from slapo_zoo.parallel.rng.seeds import GeneratorOfThreads

_ONE_AT_A_TIME = threading.Lock()


def emulate(
    function: Callable[..., Any],
    *args: Any,
    mesh: tuple[int, int, int],
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on every rank of a mesh, each a thread of this process.

    Within, `AutoScheduledModel.from_pretrained(..., tp=tp, pp=pp)` works as under torchrun, e.g.
    `losses = emulate(train, "gpt2", mesh=(4, 2, 1))`. Draws from torch's global generator (dropout
    without a directive) come in an order that differs from run to run.

    Args:
        function: runs on every rank; `torch.distributed.get_rank()` returns its rank.
        args: positional arguments of the function.
        mesh: sizes of tp, pp and dp.
        timeout_s: seconds after which a waiting collective raises.
        kwargs: keyword arguments of the function.

    Returns:
        the results of the ranks, in order.

    Raises:
        MeshError: this process has a process group already.
        Exception: the error of the first rank that failed, with its traceback as the cause.
    """
    if dist.is_initialized():
        problem = "this process has a process group already"
        raise MeshError("emulate", "", problem, "call it in a process that no launcher started")
    size = Mesh(*mesh).world_size
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    outcomes: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            join_group(store, rank, size, backend="gloo", timeout=timedelta(seconds=timeout_s))
            with rank_guard(getattr(function, "__name__", "emulate")):
                outcomes[rank] = function(*args, **kwargs)
            dist.barrier()
        except BaseException as error:
            failures.append((rank, _without_frames(error)))
            _leave_at_once()
        finally:
            if dist.is_initialized():
                heartbeat.stop()
                dist.destroy_process_group()
                gc.collect()  # a group is left when it is freed: who waits for us in it learns so

    with _ONE_AT_A_TIME, compat.process_groups_per_thread(), _one_thread(), _set_aside():
        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()  # a group that only the interpreter's end frees may abort the process
    if failures:
        raise _first_cause(failures)
    return outcomes


class RankTracebackError(Exception):
    """Traceback of the emulated rank that failed, shown as the cause of its error."""


def _without_frames(error: BaseException) -> BaseException:
    """Replace the traceback of an error by its text, since frames would keep the model and its open groups alive."""
    text = "".join(traceback.format_exception(error)).rstrip()
    error.__traceback__ = error.__context__ = None
    error.__cause__ = RankTracebackError(f"\n{text}\n")
    return error


def _leave_at_once() -> None:
    """Abort this rank's process groups, so that its peers stop waiting."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):
            group.abort()


def _first_cause(failures: list[tuple[int, BaseException]]) -> BaseException:
    """Return the first error that is no consequence of a lost peer (RankError); if there is none, the first error."""
    own = [error for _, error in failures if not isinstance(error, RankError)]
    return (own or [error for _, error in failures])[0]


@contextmanager
def _set_aside() -> Iterator[None]:
    """Context in which garbage collection skips all objects that exist already; scanning torch's takes 0.25 s each time."""
    if gc.get_freeze_count():  # set aside by somebody else, who wants it to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which torch uses one CPU thread, and every emulated rank has its own random generator state."""
    before, hook = torch.get_num_threads(), sys.excepthook
    names: Any = torch.random
    generator = names.default_generator
    names.default_generator = GeneratorOfThreads(generator)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        names.default_generator = generator
        torch.set_num_threads(before)
        sys.excepthook = hook  # a process group puts "[rank0]:" before each line of a traceback
