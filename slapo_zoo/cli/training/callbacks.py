"""What happens between two steps of a run: callbacks of the Trainer of transformers."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from slapo_zoo.cli.training.display import OnStep
from slapo_zoo.cli.training.stopping import Stop


class Verdicts(TrainerCallback):
    """Keep the best checkpoint so far, and end a run whose evaluations get no better.

    Args:
        run: the training; it begins at `run.done`.
        save: writes a model into a folder: (model, folder, tokenizer, options).
    """

    def __init__(self, run: Any, save: Callable[..., None]):
        self.run, self.save = run, save

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell Trainer how many steps are done; its own state file is not needed for it."""
        state.global_step = self.run.done

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Judge an evaluation; on all ranks, whose figures are the same."""
        run, options = self.run, self.run.options
        found = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        if run.best.judge(run.done, found) and options.best is not None:
            self.save(run.engine.model, options.best, run.inputs.tokenizer, options)
            if state.is_world_process_zero:
                Console(highlight=False, soft_wrap=True).print(f"best: {run.best}")
        if run.is_over:
            control.should_training_stop = True
            control.should_save = options.checkpoint is not None


class Records(TrainerCallback):
    """Tell what was measured of every step, with its evaluation where there is one.

    Args:
        run: the training, whose `record` is that of the last step.
        tell: called once a step.
    """

    def __init__(self, run: Any, tell: OnStep):
        self.run, self.tell = run, tell

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        """Trainer has the figures of a step; an evaluation may follow."""
        state.log_history.clear()  # it would hold every step of a long run
        if "loss" in logs and not control.should_evaluate:
            self.tell(self.run.done - 1, self.run.record)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """The step is complete."""
        self.tell(self.run.done - 1, {**self.run.record, **metrics})


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
        """An evaluation may have taken long."""
        self.on_step_end(args, state, control)
