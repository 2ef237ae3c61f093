"""Records of training steps: log file of JSON lines, progress bar, trackers, the best evaluation so far."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import enable_progress_bars, tqdm
from transformers import TrainerCallback

from slapo_zoo.cli.training.options import ConfigError, TrainOptions

PAUSE_S = 30.0  # a person who reads a log sees that it goes on
OnStep = Callable[[int, Mapping[str, Any]], None]  # called with (step, measurements)


class Records(TrainerCallback):
    """Trainer callback that passes each step's measurements, with its evaluation if any, to `tell` and to the log file.

    Args:
        run: Trainer that the callback belongs to; its `record` holds the last step's measurements, {"loss": ..., ...}.
        tell: function called after each step with (step index, measurements); None on ranks that report nothing.
    """

    def __init__(self, run: Any, tell: OnStep | None):
        self.run, self.tell = run, tell
        self.path = None if tell is None else run.options.log_file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set Trainer's step counter to the steps done before a resume, and begin the log file."""
        state.global_step = self.run.done
        if self.path is not None:
            begin_log(Path(self.path), self.run.done)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        """Pass a step's measurements (loss, gradient norm, ...) to the function `self.tell` and the log file; if an
        evaluation follows, `on_evaluate` passes them instead.
        """
        state.log_history.clear()  # it would hold every step of a long run
        if "loss" in logs and not control.should_evaluate:
            self._tell(self.run.record)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Pass a step's measurements (loss, gradient norm, ...) together with `metrics`, {"eval_loss": mean, ...}, to
        the function `self.tell` and the log file.
        """
        self._tell({**self.run.record, **metrics})

    def _tell(self, record: Mapping[str, Any]) -> None:
        if self.tell is not None:
            self.tell(self.run.done - 1, record)
        if self.path is not None:
            wrong = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
            finite = {k: None if k in wrong else v for k, v in record.items()}
            with Path(self.path).open("a", encoding="utf-8") as file:  # on disk after each line
                file.write(json.dumps({"step": self.run.done, **finite}) + "\n")


@dataclass
class Best:
    """Record of the best evaluation so far, and of the number of evaluations since.

    Args:
        metric: "loss", where less is better, or "accuracy"; between equal values the smaller loss wins.
        value: best value of the metric; None before the first finite one.
        loss: mean loss in the best evaluation.
        step: number of training steps before the best evaluation.
        since: number of evaluations after the best one.
    """

    metric: str
    value: float | None = None
    loss: float = math.inf
    step: int = 0
    since: int = 0

    def judge(self, step: int, found: Mapping[str, float]) -> bool:
        """Return whether `found`, {"loss": mean, ...} evaluated after `step` steps, is better by `self.metric` (if
        equal, by loss) than all before. If so, update this record, else add 1 to `since`.
        """
        value, loss = found[self.metric], found.get("loss", math.inf)
        sign = -1 if self.metric == "loss" else 1
        before = (-math.inf, 0.0) if self.value is None else (sign * self.value, -self.loss)
        if math.isfinite(value) and (sign * value, -loss) > before:
            self.value, self.loss, self.step, self.since = value, loss, step, 0
            return True
        self.since += 1
        return False

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric} {self.value:.4g}, loss {self.loss:.4g}"

    def state(self) -> dict[str, Any]:
        """Return this record of the best evaluation as a dict for a checkpoint."""
        loss = self.loss if math.isfinite(self.loss) else None  # as JSON
        return {**vars(self), "loss": loss}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore this record from a dict that the method `state` returned; do nothing for None or another metric."""
        if state and state.get("metric", self.metric) == self.metric:
            vars(self).update({**state, "loss": math.inf if state["loss"] is None else state["loss"]})  # fmt: skip


def begin_log(path: Path, done: int) -> None:
    """Create the log file `path`; for a run resumed after step `done`, keep the old file's lines up to that step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8").splitlines() if done and path.exists() else []
    kept = [line for line in old if _step_of(line) <= done]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line cut short by a kill
        return math.inf


@contextmanager
def progress(steps: int, every: int | None = None) -> Iterator[OnStep]:
    """Context that yields a function (step index, {"loss": ..., ...}), which shows the `steps` steps of a training by a
    bar, or by a line every `every` steps; None prints ten lines in all, and one every PAUSE_S (30) seconds.
    """
    pause, every = PAUSE_S if every is None else math.inf, every or max(1, steps // 10)
    enable_progress_bars("slapo_zoo")  # progress bars of loading may be off
    bar = tqdm(
        name="slapo_zoo", total=steps, desc="training", dynamic_ncols=True, file=sys.stdout,
        disable=not sys.stdout.isatty(),
    )  # fmt: skip
    said = time.monotonic()

    def on_step(step: int, record: Mapping[str, Any]) -> None:
        nonlocal said
        loss, norm = float(record["loss"]), float(record["grad_norm"])
        bar.set_postfix(loss=f"{loss:.4f}", norm=f"{norm:.3f}", refresh=False)
        bar.update(step + 1 - bar.n)
        if bar.disable and ((step + 1) % every == 0 or time.monotonic() - said >= pause):
            said = time.monotonic()
            bar.write(f"training: step {step + 1}/{steps}  loss {loss:.4f}  norm {norm:.3f}")
        if judged := [f"{k[5:]} {v:.4f}" for k, v in record.items() if k.startswith("eval_")]:
            bar.write(f"evaluation: step {step + 1}/{steps}  {'  '.join(judged)}")

    with bar:
        yield on_step


def check_log(path: Path) -> None:
    """Raise ConfigError if the path is a folder or a file that is no log, which a log would overwrite."""
    if path.is_dir() or (path.is_file() and not b'{"step":'.startswith(path.read_bytes()[:8])):
        problem = f"found {'a folder' if path.is_dir() else 'another file'}, expected no file yet, or the log of a training"
        raise ConfigError(str(path), "log_file", problem, "name a new file")


def check_trackers(options: TrainOptions) -> None:
    """Raise ConfigError for a tracker that Trainer does not know, or whose package is missing."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    try:
        for make in get_reporting_integration_callbacks([*options.report_to]):
            make()
    except (ValueError, RuntimeError) as error:
        hint = "install the package of this tracker, or name another tracker"
        raise ConfigError("train", "report_to", str(error), hint) from error
