"""Exit code and message of a training run that a signal stopped."""

import signal

from slapo_zoo.cli.training.options import TrainOptions

REQUEUE, INTERRUPTED = 75, 130  # exit codes: EX_TEMPFAIL of sysexits.h, and as a shell says Ctrl-C


class StoppedError(SystemExit):
    """SystemExit of a run that a signal stopped: the last step is finished, and saved if `checkpoint` is set."""

    def __init__(self, number: int, step: int, options: TrainOptions):
        self.number, self.step, self.options = number, step, options
        super().__init__(INTERRUPTED if number == signal.SIGINT else REQUEUE)

    def __str__(self) -> str:
        said = f"stopped after step {self.step} of {self.options.max_steps}; "
        if self.options.checkpoint is None:
            return said + "nothing was saved: --checkpoint FOLDER keeps what was done"
        return said + f"the same command resumes from {self.options.checkpoint}"
