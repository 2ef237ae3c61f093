"""How much of its time the pipeline of a training run waits, measured at every step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class Busy:
    """Marks of one rank: around each action of a stage, and around whole steps of the pipeline.

    On a GPU the marks are events on its stream, so nothing is waited for until `bubble` asks.

    Args:
        device: of the stages.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._actions: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    @contextmanager
    def action(self) -> Iterator[None]:
        """A forward or backward of a micro-batch runs within it."""
        begin = self._mark()
        yield
        self._actions.append((begin, self._mark()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step: the time of every action within it is counted."""
        begin = self._mark()
        yield
        self._steps.append((begin, self._mark()))

    def bubble(self, group: Any) -> float | None:
        """Share of all ranks' time in which none is computed, since the last call; collective.

        The time is that of the rank whose steps took longest. Sums over tp within an action count
        as computed.

        Args:
            group: of the ranks of the pipeline.

        Returns:
            0 to 1; None where no step ran.
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
