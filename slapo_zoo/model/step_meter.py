"""Measurements of training steps: time, tokens, memory, MFU (model FLOPs utilization) and pipeline bubble."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.pipeline.busy import Busy
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.weights.ledger import anonymous_bytes


class StepMeter:
    """Meter of a scheduled model's training step: call `start` before the step and `measured(batch)` after it."""

    def __init__(self, model: Any):
        self.mesh, self.device = model.mesh, next(iter(model.parameters())).device
        hosted = getattr(model, "hosted", None)  # an exact model's process hosts several stages
        specs = (hosted[0] if hosted else model)._slapo.specs
        per_token = sum(math.prod(spec.shape) for spec in specs)
        self.parameters = None if model.config.is_encoder_decoder else per_token
        self.peak = peak_of(self.device)
        self.begin = time.perf_counter()
        self.busy = None
        if not hosted and model._slapo.pipeline is not None:
            self.busy = model._slapo.pipeline.busy = Busy(self.device)

    def start(self) -> None:
        """Start the clock of a training step, and reset the peak of GPU memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.begin = time.perf_counter()

    def measured(self, batch: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Return {name: measurement} of the step on `batch` that just ended; call it after the step's loss was read.
        Names: seconds, tokens, tokens_per_s, memory (bytes), mfu (6 operations per parameter and token, without
        attention: arXiv:2204.02311; None if unknown) and bubble (share of waiting, averaged over pp ranks, so all ranks
        must call this function; None without a pipeline, and for a model that was loaded with `exact=`).
        """
        seconds = time.perf_counter() - self.begin
        names = ("input_ids", "labels") if self.parameters is None else ("input_ids",)
        tokens = sum(batch[name].numel() for name in names if name in batch) * self.mesh.dp
        used = 6 * (self.parameters or 0) * tokens / seconds
        return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "memory": peak_memory(self.device),
                "mfu": used / (self.peak * self.mesh.world_size) if self.peak and used else None,
                "bubble": None if self.busy is None else self.busy.bubble(self.mesh.group("pp"))}  # fmt: skip


def peak_of(device: torch.device) -> float:
    """Return the peak 16-bit operations per second of a GPU, from its data sheet; 0.0 for a CPU or an unknown GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = (HARDWARE[kind].peak for kind in ("h200", "h100", "a100", "v100") if kind.upper() in name)  # fmt: skip
    return 0.0 if "PCIe" in name else next(known, 0.0)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak bytes on a GPU `device` since `StepMeter.start`; on a CPU the process's bytes now, without mapped
    files, or None if unknown.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else anonymous_bytes() or None  # fmt: skip
