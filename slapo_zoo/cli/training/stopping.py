"""Stop of a training run on a signal: ranks finish the step, save, and say how to resume."""

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
    """Record of the last signal that reached this process; 0 if none did."""

    number = 0

    def note(self, number: int, frame: Any) -> None:
        """Record a signal, as a signal handler; the second Ctrl-C raises KeyboardInterrupt."""
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
    """Context in which signals ask the run to stop; it yields the Stop that records the signals.

    A process that started local ranks passes a signal on to them as SIGUSR1.
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
    """Trainer callback that ends a run after a signal, at the same step on all ranks, with a checkpoint.

    Args:
        run: Trainer that the callback belongs to.
        stop: record of signals; None if signals are not handled.
    """

    def __init__(self, run: Any, stop: Stop | None):
        self.run, self.stop, self.number = run, stop, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask all ranks whether a signal came; if so, end the training and save. A collective call."""
        if self.stop is not None and not self.number:
            self.number = self.stop.agreed(self.run.meter.device)
        if self.number:
            control.should_training_stop = True
            control.should_save = self.run.options.checkpoint is not None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask all ranks whether a signal came, as `on_step_end` does, since an evaluation may take long."""
        self.on_step_end(args, state, control)


class StoppedError(SystemExit):
    """SystemExit of a run that a signal stopped: the last step is finished, and saved if `checkpoint` is set."""

    def __init__(self, number: int, step: int, options: TrainOptions):
        self.number, self.step, self.options = number, step, options
        super().__init__(INTERRUPTED if number == signal.SIGINT else REQUEUE)

    def __reduce__(self) -> Any:
        """Return how to pickle the exit, so that local ranks can send it to the process that started them."""
        return type(self), (self.number, self.step, self.options)

    def __str__(self) -> str:
        said = f"stopped after step {self.step} of {self.options.max_steps}; "
        if self.options.checkpoint is None:
            return said + "nothing was saved: --checkpoint FOLDER keeps what was done"
        return said + f"the same command goes on from {self.options.checkpoint}"
