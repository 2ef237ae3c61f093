"""Signals that request the end of a training: noted in each process, agreed on by all ranks."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.parallel.ranks.process_group import is_distributed_launch

# SLURM warns by SIGTERM, or by what `--signal=USR1@120` names; a person by Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stop:
    """Record of the last signal that reached this process: `number` is its number, 0 if none did."""

    number = 0

    def note(self, number: int, frame: Any) -> None:
        """Record the signal `number`, as a handler for `signal.signal`; the second Ctrl-C raises KeyboardInterrupt."""
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number

    def agreed(self, device: torch.device) -> int:
        """Return the number of a signal that reached any rank (0: none), the same on all ranks; a collective call."""
        if not dist.is_initialized():
            return self.number
        found = torch.tensor(self.number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


@contextmanager
def listening() -> Iterator[Stop]:
    """Context in which SIGTERM, SIGUSR1 and Ctrl-C ask the run to stop; it yields the Stop that records these signals.

    A process with local ranks passes each signal on to them as SIGUSR1. Outside the main thread no signal is recorded.
    """
    stop = Stop()
    is_local_rank = is_distributed_launch() and multiprocessing.parent_process() is not None

    def note(number: int, frame: Any) -> None:
        stop.note(number, frame)
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGUSR1)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    wanted = (signal.SIGUSR1,) if is_local_rank else SIGNALS
    before = {number: signal.signal(number, note) for number in wanted}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)  # notes what came while the rank started
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
