"""Logs of every step: a JSON line in a file, and the trackers of Trainer by name."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.cli.training.config import ConfigError
from slapo_zoo.cli.training.display import OnStep
from slapo_zoo.cli.training.train_options import TrainOptions
from slapo_zoo.pipeline.busy import Busy


class Meter:
    """Measures what a step took.

    Args:
        model: of AutoScheduledModel.
    """

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
        """A step begins."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.begin = time.perf_counter()

    def measured(self, batch: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Record the step that has ended: its loss was read, so the device has done it.

        `bubble` is that of all stages, so every rank asks together. `mfu` counts 6 operations a parameter and token (arXiv:2204.02311, without attention).
        """
        seconds = time.perf_counter() - self.begin
        names = ("input_ids", "labels") if self.parameters is None else ("input_ids",)
        tokens = sum(batch[name].numel() for name in names if name in batch) * self.mesh.dp
        found: dict[str, float | None] = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds,
                 "memory": peak_memory(self.device), "mfu": None,
                 "bubble": None if self.busy is None else self.busy.bubble(self.mesh.group("pp"))}  # fmt: skip
        if self.peak and self.parameters:
            used = 6 * self.parameters * tokens / seconds
            found["mfu"] = used / (self.peak * self.mesh.world_size)
        return found


def peak_of(device: torch.device) -> float:
    """Operations per second of the data sheet, in 16 bits; 0 where it is not known."""
    from slapo_zoo.tune.planner.hardware import HARDWARE

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = (HARDWARE[kind].peak for kind in ("h200", "h100", "a100", "v100") if kind.upper() in name)  # fmt: skip
    return 0.0 if "PCIe" in name else next(known, 0.0)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes of the step on a GPU; what the process holds, files that it maps not counted, else."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if "Anonymous" in line)


class JsonLines:
    """One JSON object a step; those of steps that a resumed run repeats are taken out.

    Args:
        path: of the file.
        done: steps that are done.
    """

    def __init__(self, path: Path, done: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8").splitlines() if done and path.exists() else []
        kept = [line for line in old if _step_of(line) <= done]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write a line; it is in the file at once."""
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
        self.file.write(json.dumps({"step": step, **finite}) + "\n")

    def finish(self) -> None:
        """No line follows."""
        self.file.close()


def check_log(path: Path) -> None:
    """A log is new, or that of another run: what else lies there would be gone."""
    if path.is_dir() or (path.is_file() and not b'{"step":'.startswith(path.read_bytes()[:8])):
        problem = f"found {'a folder' if path.is_dir() else 'another file'}, expected none or a log"
        raise ConfigError(str(path), "log_file", problem, "name a new file")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the kill came in the middle of it
        return math.inf


def check_trackers(options: TrainOptions) -> None:
    """ConfigError for a tracker that is not there."""
    if not options.report_to:
        return
    from transformers.integrations import integration_utils as known

    there = known.get_available_reporting_integrations()
    for name in options.report_to:
        if name not in known.INTEGRATION_TO_CALLBACK:
            hint = f"known: {', '.join(known.INTEGRATION_TO_CALLBACK)}"
            raise ConfigError("train", f"report_to: {name}", "no such tracker", hint)
        if name not in there:
            problem = "its package is not installed"
            raise ConfigError("train", f"report_to: {name}", problem, f"pip install {name}")


def place_of_logs(options: TrainOptions) -> str:
    """The folder of trackers that write files: beside the output, for a save replaces that folder."""
    if not options.report_to:
        return "."  # nothing is written there
    run = options.output or options.checkpoint or options.best or "slapo-zoo"
    return options.logging_dir or f"{run.rstrip('/')}-logs"


@contextmanager
def kept(options: TrainOptions, show: OnStep, done: int) -> Iterator[OnStep]:
    """Within it, what every step measured is shown, and goes to the file.

    Args:
        options: of the run.
        show: is told too.
        done: steps that are done.
    """
    if options.log_file is None:
        yield show
        return
    lines = JsonLines(Path(options.log_file), done)

    def on_step(step: int, record: Mapping[str, Any]) -> None:
        show(step, record)
        lines.log(record, step=step + 1)

    try:
        yield on_step
    finally:
        lines.finish()
