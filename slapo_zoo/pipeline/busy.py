"""Measure the bubble of a training run: the share of time in which pipeline ranks compute nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class Busy:
    """Record of when one rank's stages compute, and how long whole pipeline steps take, to measure the bubble.

    On a GPU the times are CUDA events, so the host waits for none of them until `bubble` is called.

    Args:
        device: device of this rank's stages.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._actions: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    @contextmanager
    def action(self) -> Iterator[None]:
        """Context around the forward or backward of one micro-batch, which counts as computing time."""
        begin = self._mark()
        yield
        self._actions.append((begin, self._mark()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context around one whole pipeline step, which counts as elapsed time."""
        begin = self._mark()
        yield
        self._steps.append((begin, self._mark()))

    def bubble(self, group: Any) -> float | None:
        """Return the share of time since the last call of `bubble` in which ranks computed nothing; a collective call.

        The share is a number from 0 to 1, None when no step ran. The elapsed time is that of the slowest rank in
        `group`, the process group of the pipeline's ranks. Tensor-parallel collectives count as computing.
        """
        mine = [self._seconds(self._actions), self._seconds(self._steps)]
        self._actions, self._steps = [], []
        ours = torch.tensor(mine, device=self.device)
        each = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
        dist.all_gather(each, ours, group=group)
        busy, whole = torch.stack(each).T.tolist()
        return 1.0 - sum(busy) / len(busy) / max(whole) if max(whole) else None

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, marks: list[tuple[Any, Any]]) -> float:
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in marks)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in marks) / 1e3
