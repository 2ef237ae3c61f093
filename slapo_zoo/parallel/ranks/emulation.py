"""Several ranks as threads of one process.

`emulate`, for notebooks, runs all ranks of a job so. `exact=` of `from_pretrained` fixes the mesh of a training; the
ranks of this mesh are called virtual, and each process runs an equal share of them. Every thread has its own gloo
process groups, so the same collectives run, in the same order and with the same results, wherever the ranks are.
"""

import functools
import gc
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.errors import MeshError, RankError, is_agreed
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks import heartbeat
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.process_group import join_group
from slapo_zoo.parallel.rng.seeds import GeneratorOfThreads, cpu_generator
from slapo_zoo.parallel.thread_sums import Meetings

BUILDING = threading.RLock()  # torch's default dtype and transformers' patches are global
_ONE_WORLD = threading.Lock()  # torch's switch to process groups per thread is per process
_FROZEN = threading.Event()  # set where other code froze objects: to count them reads each of them
_STAYS = threading.Event()  # set while the ranks that hold the lock live until they are closed


class HostedRanks:
    """Ranks of one process group that run as threads of this process; as a context, it starts and ends the threads.
    Within the context, operations use one CPU thread, because the bits of a sum depend on the number of threads.

    Args:
        store: key-value store through which all ranks connect.
        ranks: global ranks that run in this process.
        size: number of ranks in all processes.
        timeout_s: seconds after which a waiting collective raises.
        stays: True for virtual ranks (of a model loaded with `exact=`), which live until the user closes the model.
            Until then entering another HostedRanks raises MeshError; if False, the other one waits until this one ends.
    """

    def __init__(
        self, store: Any, ranks: Sequence[int], size: int, timeout_s: float = 60.0, stays: bool = False
    ):  # fmt: skip
        self.ranks, self._size, self._timeout = tuple(ranks), size, timedelta(seconds=timeout_s)
        self._jobs: dict[int, SimpleQueue[Any]] = {rank: SimpleQueue() for rank in ranks}
        self._results: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._store, self._threads = store, []
        self._stays, self._meetings = stays, Meetings(ranks, timeout_s)
        self._failed: dict[int, BaseException] = {}  # rank --> why it has left

    def __enter__(self) -> "HostedRanks":
        if _STAYS.is_set():
            problem = "this process already runs the ranks of a model that was loaded with exact="
            hint = "call close() of that model first"
            raise MeshError("ranks as threads", "emulate or exact=", problem, hint)
        _allow_files(len(self.ranks) * self._size)
        with ExitStack() as within:  # frees the lock if one of the others fails
            within.enter_context(_ONE_WORLD)
            if self._stays:
                _STAYS.set()
                within.callback(_STAYS.clear)
            shared = compat.process_groups_per_thread, _one_thread, _set_aside, _loads_in_turn
            for context in shared:
                within.enter_context(context())
            self._within = within.pop_all()
        for rank in self.ranks:
            thread = threading.Thread(target=self._work, args=(rank,), name=f"rank {rank}", daemon=True)  # fmt: skip
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        gc.collect()  # a group that is freed only at interpreter exit may abort the process
        self._within.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` for every rank of this process in its own thread; return the results by rank.

        Raises:
            Exception: the error of the first rank that failed, with its traceback as the cause.
        """
        if not self._threads or threading.current_thread() in self._threads:
            problem = "the ranks have ended (close, interrupt), or this is the thread of one"
            hint = "load the model again, or make this call outside of loss_fn and hooks"
            raise MeshError("exact=", getattr(function, "__qualname__", "call"), problem, hint)
        own = cpu_generator()  # the caller's; all ranks start from its state
        casts = "cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

        def call(rank: int, *given: Any) -> Any:
            own_of_rank = cpu_generator()
            own_of_rank.mark = mark
            with torch.autocast(*casts) if casts[2] else nullcontext():  # else casts outlive a step
                found = function(rank, *given)
            marks[rank] = own_of_rank.mark
            return found

        marks: dict[int, int] = {}
        mark = own.mark
        functools.update_wrapper(call, function)
        for rank in self.ranks:
            self._jobs[rank].put((call, *args))
        try:
            found = [self._results.get() for _ in self.ranks]
        except BaseException:  # Ctrl-C: the threads may hang in a collective, so do not join them
            self._threads.clear()
            raise
        own.mark = marks.get(self.ranks[0], mark)
        if failures := [error for _, _, error in found if error is not None]:
            # a RankError only reports a lost peer
            raise next((e for e in failures if not isinstance(e, RankError)), failures[0])
        return [value for _, value, _ in sorted(found, key=lambda each: each[0])]

    def _work(self, rank: int) -> None:
        """Run the thread of one rank: join the process group, call each function that `run` passes, leave at the end."""
        store = self._store.clone()  # threads that share a store object would block each other
        jobs = self._jobs[rank]
        if self._stays:
            self._meetings.enter()
        self._done(rank, lambda _: join_group(store, rank, self._size, backend="gloo", timeout=self._timeout))  # fmt: skip
        while (job := jobs.get()) is not None:
            self._results.put((rank, *self._done(rank, *job)))
            del job
        if dist.is_initialized():
            with suppress(RuntimeError):  # a failed peer is missing
                dist.barrier()
            _leave()

    def _done(
        self, rank: int, function: Callable[..., Any], *args: Any
    ) -> tuple[Any, BaseException | None]:
        """Call `function(rank, *args)`; return (result, None), or (None, error) if the call raised. After an error that
        other ranks may lack (`is_agreed` False) the rank leaves its process groups, and later calls return it.
        """
        if rank in self._failed:
            return None, self._failed[rank]
        try:
            with rank_guard(getattr(function, "__name__", "emulate")):
                return function(rank, *args), None
        except BaseException as error:
            found = _without_frames(error)
            if not is_agreed(error):
                self._failed[rank] = found
                self._meetings.abort()
                _leave_at_once()
            return None, found


def emulate(
    function: Callable[..., Any],
    *args: Any,
    mesh: tuple[int, int, int],
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on every rank of a mesh, each a thread of this process.

    For example `losses = emulate(train, "gpt2", mesh=(4, 2, 1))`, where `train` loads a model by
    `AutoScheduledModel.from_pretrained(..., tp=4, pp=2)` as under torchrun. The ranks share torch's global generator,
    so draws from it (by dropout that slapo_zoo does not seed) differ from run to run.

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
        hint = "start Python without torchrun or srun to emulate, and do not nest emulate"
        raise MeshError("emulate", f"mesh={mesh}", problem, hint)
    size = Mesh(*mesh).world_size
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    @functools.wraps(function)
    def call(_rank: int) -> Any:
        return function(*args, **kwargs)

    with HostedRanks(store, range(size), size, timeout_s) as ranks:
        return ranks.run(call)


def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose first argument is a model.

    If the model was loaded with `exact=`, which runs several virtual ranks in one process, one thread each, the wrapper
    calls the function in each thread, with that rank's model, and returns the first result; else it calls it once.
    """

    @functools.wraps(function)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        each = getattr(model, "on_each_rank", None)
        return each(function, *args, **kwargs) if each else function(model, *args, **kwargs)

    return call


def called_once(function: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a function without arguments: its first call runs the body, and every call returns that result.
    `functools.cache` alone lets two threads run the body when both call it first.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def call() -> Any:
        with BUILDING:
            return cached()

    return call


class RankTracebackError(Exception):
    """Traceback, as text, of the failed rank (a thread); it is the cause of the rank's error."""


def _without_frames(error: BaseException) -> BaseException:
    """Return the error, its traceback as text in `__cause__`: frames would keep the model and its open groups alive."""
    text = "".join(traceback.format_exception(error)).rstrip()
    error.__traceback__ = error.__context__ = None
    error.__cause__ = RankTracebackError(f"\n{text}\n")
    return error


def _leave_at_once() -> None:
    """Abort and destroy all process groups of this rank, a thread that failed: its peers stop waiting."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):
            group.abort()
    _leave()
    gc.collect()  # freeing a group closes its connections, so peers that wait in it get an error


def _leave() -> None:
    """Destroy this rank's process groups."""
    if dist.is_initialized():
        heartbeat.stop()
        dist.destroy_process_group()


@contextmanager
def _set_aside() -> Iterator[None]:
    """Context in which garbage collection skips all objects that exist already: to scan those of torch takes 0.25 s."""
    by_others = _FROZEN.is_set() or gc.get_freeze_count() > 0
    (_FROZEN.set if by_others else gc.freeze)()
    try:
        yield
    finally:
        if not by_others:
            gc.unfreeze()


@contextmanager
def _loads_in_turn() -> Iterator[None]:
    """Context in which plain `from_pretrained` of transformers runs in one thread at a time. While it builds a model,
    transformers replaces `PreTrainedModel.tie_weights` by an empty method and sets the default dtype, for all threads:
    one thread would tie no weights, and another would "restore" the empty method.
    """
    from transformers import PreTrainedModel

    patched: Any = PreTrainedModel
    original = PreTrainedModel.__dict__["from_pretrained"]

    def in_turn(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with BUILDING:
            return original.__func__(cls, *args, **kwargs)

    patched.from_pretrained = classmethod(in_turn)
    try:
        yield
    finally:
        patched.from_pretrained = original


def _allow_files(pairs: int) -> None:
    """Raise this process's limit of open files to what gloo needs: a socket for each of `pairs` pairs of ranks in each
    of several process groups. Without it gloo kills the process. MeshError if the system's hard limit is lower.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 2 * pairs + 256
    if 0 <= most < least:
        problem = f"found a limit of {most} open files, expected at least {least} for these ranks in one process"
        raise MeshError("ranks as threads", "emulate or exact=", problem, "take fewer ranks, or raise the limit (ulimit -Hn)")  # fmt: skip
    wanted = 3 * least if most < 0 else min(most, 3 * least)
    if 0 <= before < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which torch computes with one CPU thread, and a GeneratorOfThreads replaces its CPU generator. Ranks
    that are threads draw from that one generator. The replacement passes every call on to it, and keeps for each rank a
    hash of the state in which the generator would be if the rank were a process.
    """
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
