"""Four ranks that save, one of which is killed on the way; run as a program by the crash test.

    python crash_ranks.py <folder> <rank to kill> <where: write | finish | a number> ...

Several cases may follow each other. A number counts what the saving code of that rank calls outside
of Python: system calls and the like. Every survivor writes what it was told to
<folder>-error-<rank>, and every rank that ends its number of calls to <folder>-calls-<rank>.
"""

import itertools
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shards import local_tensors, model
from slapo_zoo.errors import RankError, WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks import killed_rank
from slapo_zoo.parallel.ranks.patience import patient_group
from slapo_zoo.weights import save, staging, write

WORLD, AT_ONCE = 4, 4


def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Kill this process at the n-th call out of the code of slapo_zoo/weights."""

    def __init__(self, n):
        self.n, self.calls = n, 0

    def __call__(self, frame, event, arg):
        if event == "c_call" and "slapo_zoo/weights" in frame.f_code.co_filename:
            self.calls += 1
            if self.calls == self.n:
                kill()


def work(folder, rank, victim, where):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}-store", WORLD)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    # who died is named by tests/parallel/test_killed_rank.py; here it would take seconds a kill
    killed_rank.SILENT_S = killed_rank.ERROR_WAIT_S = 0.5
    patient_group()  # ranks that never met notice a death later: tests/parallel/test_slow_ranks.py
    dist.barrier()  # nor does a rank die while another one still connects to it
    mesh = Mesh(tp=2, pp=2, rank=rank)
    specs, full = model(mesh.pp)
    extras = None
    countdown = Countdown(int(where) if rank == victim and where.isdigit() else 0)
    if rank == victim and where == "write":
        write.os.fsync = kill  # the last thing that a rank does with its first file
    elif rank == victim and where == "finish":
        extras = kill
    elif where.isdigit():
        sys.setprofile(countdown)
    try:
        save.save_folder(folder, specs, local_tensors(specs, full, mesh), mesh, extras, "1KB")
    except (WeightsError, RankError) as error:
        sys.setprofile(None)
        Path(f"{folder}-error-{rank}").write_text(f"{type(error).__name__}: {error}")
    sys.setprofile(None)
    Path(f"{folder}-calls-{rank}").write_text(str(countdown.calls))
    os._exit(0)  # no farewell to peers that are gone


def start(folder, victim, where):
    """Start the ranks of a case; return their process ids."""
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            work(folder, rank, int(victim), where)
        children.append(child)
    return children


def warm_up():
    """Import once what torch would import at its first use in every rank."""
    specs, full = model(1)
    with tempfile.TemporaryDirectory() as folder:
        save.save_folder(folder, specs, full, Mesh())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "NO_EXCHANGE" in os.environ:  # as on NFS
        staging._renameat2 = lambda *args: False
    warm_up()
    cases = [sys.argv[i : i + 3] for i in range(1, len(sys.argv), 3)]
    for i in range(0, len(cases), AT_ONCE):  # a survivor waits most of its time
        children = [start(*case) for case in cases[i : i + AT_ONCE]]
        for child in itertools.chain(*children):
            os.waitpid(child, 0)
