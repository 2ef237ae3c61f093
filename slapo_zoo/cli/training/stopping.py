"""A request to stop: the ranks finish their step, save, and say how to go on."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.cli.training.train_options import TrainOptions
from slapo_zoo.parallel.ranks.process_group import is_distributed_launch

# SLURM warns by SIGTERM, or by what `--signal=USR1@120` names; a person by Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE, INTERRUPTED = 75, 130  # exit codes: EX_TEMPFAIL of sysexits.h, and as a shell says Ctrl-C


class Stop:
    """Which signal has come to this process; ranks agree on it after every step."""

    number = 0

    def note(self, number: int, frame: Any) -> None:
        """A signal's handler; the second Ctrl-C ends at once."""
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number

    def agreed(self, device: torch.device) -> int:
        """The signal that came to any rank, on all ranks; a collective call."""
        if not dist.is_initialized():
            return self.number
        found = torch.tensor(self.number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


@contextmanager
def listening(local_rank: bool = False) -> Iterator[Stop]:
    """Within it, signals ask for a stop.

    Args:
        local_rank: our parent started us: it passes requests on by SIGUSR1, and ends us by SIGTERM.
    """
    stop = Stop()
    wanted = (signal.SIGUSR1,) if local_rank else SIGNALS
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.note) for number in wanted}
    try:
        yield stop
    finally:
        _restore(before)


@contextmanager
def passing_on() -> Iterator[Stop]:
    """Within it, signals that ask for a stop go to the local ranks too."""
    stop = Stop()

    def note(number: int, frame: Any) -> None:
        stop.note(number, frame)
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGUSR1)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        _restore(before)


def _restore(before: Mapping[Any, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


def is_local_rank() -> bool:
    """Return whether `run_local` started this process."""
    return is_distributed_launch() and multiprocessing.parent_process() is not None


def exit_code(number: int) -> int:
    """130 for Ctrl-C, else one that says: start me again."""
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


class StoppedError(SystemExit):
    """A signal asked for it: the step is finished, and saved where there is a place for it."""

    def __init__(self, number: int, step: int, options: TrainOptions):
        self.number, self.step, self.options = number, step, options
        super().__init__(exit_code(number))

    def __reduce__(self) -> Any:
        """It travels from the ranks to the process that started them."""
        return type(self), (self.number, self.step, self.options)

    def __str__(self) -> str:
        said = f"stopped after step {self.step} of {self.options.max_steps}; "
        if self.options.checkpoint is None:
            return said + "nothing was saved: --checkpoint FOLDER keeps what was done"
        return said + f"the same command goes on from {self.options.checkpoint}"
