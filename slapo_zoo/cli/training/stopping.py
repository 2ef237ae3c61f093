"""A request to stop: the ranks finish their step, save, and say how to go on."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.parallel.ranks.process_group import is_distributed_launch

# SLURM warns by SIGTERM, or by what `--signal=USR1@120` names; a person by Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE, INTERRUPTED = 75, 130  # exit codes: EX_TEMPFAIL of sysexits.h, and as a shell says Ctrl-C


class Stop:
    """Hold the signal that has come to this process; ranks agree on it after every step."""

    number = 0

    def note(self, number: int, frame: Any) -> None:
        """Handle a signal; the second Ctrl-C ends at once."""
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number

    def agreed(self, device: torch.device) -> int:
        """Return the signal that came to any rank, on all ranks; a collective call."""
        if not dist.is_initialized():
            return self.number
        found = torch.tensor(self.number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


@contextmanager
def listening() -> Iterator[Stop]:
    """Context in which signals ask for a stop.

    The process that starts local ranks passes requests on to them by SIGUSR1, and ends them by SIGTERM.
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
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping(TrainerCallback):
    """End a run that a signal asks to stop, on all ranks at the same step, with a checkpoint.

    Args:
        run: the training.
        stop: which signal has come; None: nobody listens.
    """

    def __init__(self, run: Any, stop: Stop | None):
        self.run, self.stop, self.number = run, stop, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the other ranks; a collective call."""
        if self.stop is not None and not self.number:
            self.number = self.stop.agreed(self.run.meter.device)
        if self.number:
            control.should_training_stop = True
            control.should_save = self.run.options.checkpoint is not None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask again, for an evaluation may have taken long."""
        self.on_step_end(args, state, control)


class StoppedError(SystemExit):
    """Exit of a run that a signal asked to stop: the step is finished, and saved where there is a place."""

    def __init__(self, number: int, step: int, options: TrainOptions):
        self.number, self.step, self.options = number, step, options
        super().__init__(INTERRUPTED if number == signal.SIGINT else REQUEUE)

    def __reduce__(self) -> Any:
        """Let it travel from the ranks to the process that started them."""
        return type(self), (self.number, self.step, self.options)

    def __str__(self) -> str:
        said = f"stopped after step {self.step} of {self.options.max_steps}; "
        if self.options.checkpoint is None:
            return said + "nothing was saved: --checkpoint FOLDER keeps what was done"
        return said + f"the same command goes on from {self.options.checkpoint}"
