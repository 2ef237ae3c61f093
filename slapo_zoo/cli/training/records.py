"""Records of training steps: measurements, log file of JSON lines, progress bar, trackers."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import enable_progress_bars, tqdm
from torch import Tensor
from transformers import TrainerCallback

from slapo_zoo.cli.training.options import ConfigError, TrainOptions
from slapo_zoo.pipeline.busy import Busy
from slapo_zoo.weights.ledger import anonymous_bytes

PAUSE_S = 30.0  # a person who reads a log sees that it goes on
OnStep = Callable[[int, Mapping[str, Any]], None]  # step, and what was measured of it


class Meter:
    """Measurement of time, tokens, memory, MFU and bubble of each step of a `model` that AutoScheduledModel loaded."""

    def __init__(self, model: Any):
        self.mesh, self.device = model.mesh, next(iter(model.parameters())).device
        per_token = sum(math.prod(spec.shape) for spec in model._slapo.specs)
        self.parameters = None if model.config.is_encoder_decoder else per_token
        self.peak = peak_of(self.device)
        self.begin = time.perf_counter()
        self.busy = None
        if model._slapo.pipeline is not None:
            self.busy = model._slapo.pipeline.busy = Busy(self.device)

    def start(self) -> None:
        """Start the clock of a step, and reset the peak of GPU memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.begin = time.perf_counter()

    def measured(self, batch: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Return the measurements of the step that just ended; call it after the step's loss was read.

        `memory` is in bytes. `mfu` counts 6 operations per parameter and token (arXiv:2204.02311), without
        attention. With a pipeline `bubble` is averaged over pp ranks, so all ranks must call this function.
        """
        seconds = time.perf_counter() - self.begin
        names = ("input_ids", "labels") if self.parameters is None else ("input_ids",)
        tokens = sum(batch[name].numel() for name in names if name in batch) * self.mesh.dp
        used = 6 * (self.parameters or 0) * tokens / seconds
        return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "memory": peak_memory(self.device),
                "mfu": used / (self.peak * self.mesh.world_size) if self.peak and used else None,
                "bubble": None if self.busy is None else self.busy.bubble(self.mesh.group("pp"))}  # fmt: skip


def peak_of(device: torch.device) -> float:
    """Return the peak 16-bit operations per second on the device's data sheet; 0 if unknown."""
    from slapo_zoo.tune.planner.hardware import HARDWARE

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = (HARDWARE[kind].peak for kind in ("h200", "h100", "a100", "v100") if kind.upper() in name)  # fmt: skip
    return 0.0 if "PCIe" in name else next(known, 0.0)


def peak_memory(device: torch.device) -> int | None:
    """Return the step's peak bytes on a GPU; on a CPU the bytes of the process without mapped files."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else anonymous_bytes() or None  # fmt: skip


class Records(TrainerCallback):
    """Trainer callback that reports the measurements of every step, with its evaluation if there was one.

    Args:
        run: Trainer that the callback belongs to; its `record` holds the last step's measurements.
        tell: function called with each step's measurements; None on ranks that report nothing.
    """

    def __init__(self, run: Any, tell: OnStep | None):
        self.run, self.tell = run, tell
        self.path = None if tell is None else run.options.log_file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set Trainer's step counter to the steps already done, and begin the log file."""
        state.global_step = self.run.done
        if self.path is not None:
            begin_log(Path(self.path), self.run.done)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        """Report the measurements of a step, unless an evaluation follows: `on_evaluate` then reports them."""
        state.log_history.clear()  # it would hold every step of a long run
        if "loss" in logs and not control.should_evaluate:
            self._tell(self.run.record)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Report the measurements of a step together with its evaluation."""
        self._tell({**self.run.record, **metrics})

    def _tell(self, record: Mapping[str, Any]) -> None:
        if self.tell is not None:
            self.tell(self.run.done - 1, record)
        if self.path is not None:
            finite = {k: v if v is None or math.isfinite(v) else None for k, v in record.items()}
            with Path(self.path).open("a", encoding="utf-8") as file:  # it is there at once
                file.write(json.dumps({"step": self.run.done, **finite}) + "\n")


def begin_log(path: Path, done: int) -> None:
    """Create a log file, or for a resumed run keep the lines up to step `done` of the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8").splitlines() if done and path.exists() else []
    kept = [line for line in old if _step_of(line) <= done]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the kill came in the middle of it
        return math.inf


@contextmanager
def progress(steps: int, every: int | None = None) -> Iterator[OnStep]:
    """Context that yields a function to report steps: as a progress bar, or as lines without a terminal.

    Args:
        steps: steps of the whole training.
        every: steps between two lines; None prints ten lines in all, and one every PAUSE_S seconds.
    """
    pause, every = PAUSE_S if every is None else math.inf, every or max(1, steps // 10)
    enable_progress_bars("slapo_zoo")  # those of loading may be off
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
        problem = f"found {'a folder' if path.is_dir() else 'another file'}, expected none or a log"
        raise ConfigError(str(path), "log_file", problem, "name a new file")


def check_trackers(options: TrainOptions) -> None:
    """Raise ConfigError for a tracker that Trainer does not know, or whose package is missing."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for make in get_reporting_integration_callbacks([*options.report_to]):
            make()
    except (ValueError, RuntimeError) as error:
        hint = "install its package, or name another"
        raise ConfigError("train", "report_to", str(error), hint) from error


def place_of_logs(options: TrainOptions) -> str:
    """Return the folder for files of trackers, which is beside the output folder: a save replaces the output folder."""
    if not options.report_to:
        return "."  # nothing is written there
    run = options.output or options.checkpoint or options.best or "slapo-zoo"
    return options.logging_dir or f"{run.rstrip('/')}-logs"
