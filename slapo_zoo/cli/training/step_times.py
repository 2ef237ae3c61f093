"""Training steps on random input, timed on the ranks that a launcher started or that we start."""

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from slapo_zoo.model.auto import AutoScheduledModel
from slapo_zoo.parallel.process_group import (
    init_distributed,
    is_distributed_launch,
    rank_guard,
    shutdown_distributed,
)
from slapo_zoo.errors import MeshError
from slapo_zoo.hf.example_inputs import random_batch
from slapo_zoo.parallel.launch import run_local
from slapo_zoo.pipeline.profiler import record_step
from slapo_zoo.pipeline.timeline import Span
from slapo_zoo.cli.training import job

WARM_UP = 2


@dataclass(frozen=True)
class BenchOptions:
    """What to time; as the options of `slapo-zoo bench`."""

    model: str
    tp: int
    pp: int
    dp: int
    order: str
    micro_batches: int | None
    batch_size: int
    seq_len: int
    steps: int
    trace: bool
    device: str | None


@dataclass(frozen=True)
class StepTimes:
    """The outcome.

    Args:
        device: name of the device.
        seconds: median of a step on rank 0.
        spans: timeline of one more step of rank 0's pipeline, if asked for.
    """

    device: str
    seconds: float
    spans: list[Span]


def measure(options: BenchOptions) -> StepTimes | None:
    """Time the steps; None on the ranks other than the first."""
    if is_distributed_launch():
        init_distributed(device=options.device)
        with rank_guard("bench"):
            found = time_steps(options)
        first = os.environ["RANK"] == "0"
        shutdown_distributed()
        return found if first else None
    world = options.tp * options.pp * options.dp
    if world == 1:
        return time_steps(options)
    return run_local(time_steps, world, (options,), device=options.device)[0]


def time_steps(options: BenchOptions) -> StepTimes:
    """What one rank does."""
    longest = getattr(job.read_config(options.model), "max_position_embeddings", None)
    if longest and options.seq_len > longest:
        problem = f"found {options.seq_len}, the model has {longest} positions"
        raise MeshError("bench", "--seq-len", problem, "shorten the rows")
    model: Any = AutoScheduledModel.from_pretrained(
        options.model, tp=options.tp, pp=options.pp, dp=options.dp, device=options.device,
        pipeline_order=options.order, micro_batches=options.micro_batches,
    ).train()  # fmt: skip
    device = next(model.parameters()).device
    batch = random_batch(model, options.batch_size, options.seq_len)
    batch = {name: value.to(device) for name, value in batch.items()}
    seconds = []
    for _ in range(WARM_UP + options.steps):
        model.zero_grad()
        begin = time.perf_counter()
        model.train_step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    spans = record_step(model, batch) if options.trace else []
    return StepTimes(name, statistics.median(seconds[WARM_UP:]), spans)
