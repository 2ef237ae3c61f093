"""Pool of worker processes with warm imports: a test runs a function on many ranks in milliseconds.

    def work(argument): ...            # a function of the test module

    def test_something(ranks):
        results = ranks.run(work, 4, argument)      # one result per rank, in order

The workers are forked from a server that has imported `warm` and does nothing else, so no thread,
lock or gradient of the test process comes along. Every job gets a gloo process
group of its own, the warning filters of its test, and the same seed on every rank. A failed job
costs its workers; new ones are forked for the next.
"""

import faulthandler
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import shared_forkserver
from releases import take_any_peft
from slapo_zoo.parallel.ranks.emulation import emulate
from slapo_zoo.parallel.ranks.launch import (
    collect,
    prepare_rank,
    rank_environment,
    send_outcome,
    start_rank,
    stop,
)
from slapo_zoo.parallel.ranks.process_group import shutdown_distributed

COLLECTIVE_TIMEOUT_S = 30
SEED = 1234


def seed_all(seed=SEED):
    """Seed Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class Job:
    """Job of a worker: what it needs before it can unpickle the function and its arguments."""

    number: int
    rank: int
    nprocs: int
    port: int
    name: str
    module: str
    file: str
    filters: list


def forkserver():
    """Return the fork server whose processes have imported `warm` and `warm_saves`."""
    shared_forkserver.use()
    return multiprocessing.get_context("forkserver")


class RankPool:
    """Pool of workers, forked when first needed."""

    def __init__(self):
        self._context = forkserver()
        self._workers = []
        self._numbers = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory()

    def run(self, fn, nprocs, *args, timeout=120.0):
        """Call `fn(*args)` on `nprocs` ranks; return their results in rank order.

        An exception on a rank is raised here as it was there, with that rank's traceback as a
        note. A rank that dies or takes longer than `timeout` seconds is a RankError.
        """
        data = pickle.dumps((fn, args))  # before any work: a local function is an error here
        workers = self._take(nprocs)
        self._send(workers, fn, data)
        error = None
        try:
            results, failure = collect(workers, timeout, fn.__qualname__)
            if failure is not None:
                error = failure.error or failure.report
                error.add_note(failure.traceback_text or self._stacks_of(workers))
        except BaseException:  # Ctrl+C: what the workers do now is of no use to the next job
            self._drop(nprocs)
            raise
        if error is not None:
            self._drop(nprocs)
            raise error
        return results

    def close(self):
        """End all workers."""
        self._drop(len(self._workers))
        self._stacks.cleanup()

    @property
    def pids(self):
        """Process ids of the workers that live now, in rank order."""
        return [worker.process.pid for worker in self._workers]

    def _take(self, nprocs):
        while len(self._workers) < nprocs:
            args = (self._store.port, self._stacks.name)
            self._workers.append(start_rank(self._context, len(self._workers), _work, args))
        return [replace(worker, rank=rank) for rank, worker in enumerate(self._workers[:nprocs])]

    def _drop(self, nprocs):
        dropped, self._workers = self._workers[:nprocs], self._workers[nprocs:]
        stop(dropped)

    def _send(self, workers, fn, data):
        module = sys.modules[fn.__module__]
        job = Job(
            number=next(self._numbers), rank=0, nprocs=len(workers), port=self._store.port,
            name=fn.__qualname__, module=fn.__module__, file=module.__file__,
            filters=warnings.filters[:],
        )  # fmt: skip
        for worker in workers:
            with suppress(OSError):  # a worker that died since: `collect` will say so
                worker.pipe.send(replace(job, rank=worker.rank))
                worker.pipe.send_bytes(data)

    def _stacks_of(self, workers):
        """Return the stack of each rank that still lives, or that a signal such as SIGSEGV ended."""
        living = [worker for worker in workers if worker.process.is_alive()]
        for worker in living:
            os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.2 if living else 0)
        files = {w.rank: Path(self._stacks.name, str(w.process.pid)) for w in workers}
        said = {rank: file.read_text() for rank, file in files.items() if file.exists()}
        return "\n".join(f"rank {rank}:\n{text}" for rank, text in said.items() if text)


class ThreadRanks:
    """Ranks that are threads of this process: the same sums and orders, but one import and one dry run for all of them."""

    def run(self, fn, nprocs, *args, timeout=60.0):
        """Call `fn(*args)` on `nprocs` ranks; return their results in rank order, or raise the first error."""
        seed_all()
        mesh = nprocs, 1, 1  # a loader in `fn` makes its own of so many ranks
        return emulate(fn, *args, mesh=mesh, timeout_s=timeout) if nprocs > 1 else [fn(*args)]


def _work(pipe, port, stacks):
    prepare_rank(threads=1)
    file = Path(stacks, str(os.getpid())).open("w")  # noqa: SIM115 - open as long as we live
    faulthandler.register(signal.SIGUSR1, file=file)
    faulthandler.enable(file)  # also of a rank that a signal ends
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        job, data = pipe.recv(), pipe.recv_bytes()
        with warnings.catch_warnings():
            warnings.filters[:] = job.filters
            if not send_outcome(pipe, job.rank, job.name, lambda: _run(job, data, store)):  # noqa: B023
                return  # the group may be in disorder: a new worker takes over


def _run(job, data, store):
    _load_module(job.module, job.file)
    take_any_peft()
    fn, args = pickle.loads(data)
    os.environ.update(rank_environment(job.rank, job.nprocs, job.port))
    seed_all()
    own = dist.PrefixStore(f"job{job.number}", store)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=own, rank=job.rank, world_size=job.nprocs, timeout=timeout
    )
    result = fn(*args)
    shutdown_distributed()
    return result


def _load_module(name, file):
    """Import a test module by its file, since --import-mode=importlib puts it on no path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
