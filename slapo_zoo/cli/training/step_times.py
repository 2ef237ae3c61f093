"""Timing of training steps on random input, after a check of the model's loss."""

import math
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from slapo_zoo.hf.example_inputs import random_batch
from slapo_zoo.model.load.auto import AutoScheduledModel
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.pipeline.profiler import record_step
from slapo_zoo.pipeline.timeline import Span
from slapo_zoo.verify.report import VerifyError

WARM_UP = 2
ALLOWED = {torch.float32: 1e-3}  # difference of losses / max(1, loss) by dtype; 3e-2 for others


@dataclass(frozen=True)
class StepTimes:
    """Result of timing a model's training steps.

    Args:
        device: name of the device.
        seconds: median seconds per step on rank 0.
        losses: (loss of the scheduled model, loss of plain `transformers` on the CPU in float32) on the timed
            batch before the first step, without dropout.
        spans: timed forwards and backwards of one more step of rank 0's pipeline; empty if not asked for.
    """

    device: str
    seconds: float
    losses: tuple[float, float]
    spans: list[Span]


def time_steps(load: dict[str, Any], rows: int, tokens: int, steps: int, trace: bool) -> StepTimes:
    """Time training steps of the model that from_pretrained(**load) returns, and check its loss; all ranks call this.

    Args:
        load: arguments of AutoScheduledModel.from_pretrained.
        rows: rows per step and data-parallel replica.
        tokens: tokens per row.
        steps: number of timed steps, which follow two steps to warm up.
        trace: record a timeline of one more step.

    Raises:
        VerifyError: the loss differs from the plain model's loss by over 1e-3 (fp32; else 3e-2) * max(1, that loss).
    """
    name = load["name_or_path"]
    model: Any = AutoScheduledModel.from_pretrained(**load).train()
    device = next(model.parameters()).device
    batch = random_batch(model, rows, tokens)
    batch = {name: value.to(device) for name, value in batch.items()}
    losses = _compared(name, model, batch)
    seconds = []
    for _ in range(WARM_UP + steps):
        model.zero_grad()
        begin = time.perf_counter()
        model.train_step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    spans = record_step(model, batch) if trace else []
    return StepTimes(kind, statistics.median(seconds[WARM_UP:]), losses, spans)


def _compared(name: str, model: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the losses on `batch` of (`model`, the plain model in checkpoint `name`). VerifyError is raised if they
    differ by over 1e-3 (in fp32, else 3e-2) of the plain loss or, if that is below 1, of 1.
    """
    model.eval()
    with torch.no_grad():
        ours = float(model(**batch).loss)
    plain = together(model.mesh, "bench", lambda: _plain_loss(name, model, batch))[0]
    allowed = ALLOWED.get(model.dtype, 3e-2) * max(1.0, abs(plain))
    if plain == plain and not abs(ours - plain) <= allowed:
        problem = f"the scheduled loss is {ours:.6g}, that of plain transformers {plain:.6g}"
        hint = f"nothing was timed; slapo-zoo verify {name} finds what differs"
        raise VerifyError("bench", type(model).__name__, problem, hint)
    model.train()
    return ours, plain


def _plain_loss(name: str, model: Any, batch: dict[str, Any]) -> float:
    """Return the loss on `batch` of the checkpoint `name`, loaded on rank 0 with plain transformers in float32 on the
    CPU. NaN, which means no comparison, is returned on other ranks, and if the weights need over half the free memory.
    `model` is the scheduled model, of which class and sizes are read.
    """
    plain_class: Any = model.unscheduled_class
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = 4 * sum(math.prod(spec.shape) for spec in model._slapo.specs)
    if model.mesh.rank or size > free / 2:
        return math.nan
    plain = plain_class.from_pretrained(name, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(plain(**{name: value.cpu() for name, value in batch.items()}).loss)
