"""The batch of every step, the same whatever the layout."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.cli.data.rows import Rows, checksum
from slapo_zoo.cli.data.tasks import IGNORED, Task

ORDER, CHANCE, EVALUATION = 0, 1, 2  # what a number is drawn for


@dataclass(frozen=True)
class Batches:
    """The batch of every step, a function of the seed alone: any rank can make its part.

    Args:
        rows: by number.
        task: makes batches of them.
        batch_size: rows per step, over all data-parallel ranks together.
        seed: decides the order of the rows and the masks.
    """

    rows: Rows
    task: Task
    batch_size: int
    seed: int

    def part(self, step: int, dp_coord: int = 0, dp: int = 1) -> dict[str, Tensor]:
        """The batch of one data-parallel rank; tp and pp peers get the same."""
        rows = self.rows[self._numbers(step)]
        batch = self.task.collate(rows, generator_of(self.seed, step, CHANCE))
        return part_of(batch, dp_coord, dp)

    def in_order(self, most: int | None = None) -> int:
        """How many batches all rows fill, the last one perhaps in part; at most so many."""
        size = self.batch_size
        count = len(self.rows) // size if self.task.couples else -(-len(self.rows) // size)
        return count if most is None else min(count, most)

    def part_in_order(self, number: int, dp_coord: int = 0, dp: int = 1) -> dict[str, Tensor]:
        """Return the rows in the order of the data; a short last batch is filled with rows without labels."""
        begin = number * self.batch_size
        numbers = list(range(begin, min(begin + self.batch_size, len(self.rows))))
        batch = self.task.collate(self.rows[numbers], generator_of(self.seed, number, EVALUATION))
        if short := -len(numbers) % dp:
            more = {name: whole[-1:].repeat_interleave(short, 0) for name, whole in batch.items()}
            more["labels"] = torch.full_like(more["labels"], IGNORED)
            batch = {name: torch.cat([whole, more[name]]) for name, whole in batch.items()}
        return part_of(batch, dp_coord, dp)

    def _numbers(self, step: int) -> list[int]:
        """Every row once per epoch, each epoch in an order of its own; a short rest is dropped."""
        epoch, turn = divmod(step, len(self.rows) // self.batch_size)
        order = order_of(self.seed, epoch, len(self.rows))
        return order[turn * self.batch_size : (turn + 1) * self.batch_size].tolist()

    def position(self, step: int) -> dict[str, Any]:
        """What, beside the number of steps, says which rows come next; `text` is a checksum."""
        return {
            "rows": len(self.rows), "seq_len": self.task.seq_len, "batch_size": self.batch_size,
            "seed": self.seed, "text": checksum(self.rows), "task": type(self.task).__name__,
        }  # fmt: skip

    def resume(self, position: Any) -> None:
        """Every step is known from its number."""


@lru_cache(maxsize=1)
def order_of(seed: int, epoch: int, count: int) -> Tensor:
    """The numbers of an epoch's rows; of many rows it takes a second to make."""
    return torch.randperm(count, generator=generator_of(seed, epoch, ORDER))


def part_of(batch: dict[str, Tensor], dp_coord: int, dp: int) -> dict[str, Tensor]:
    """The rows of one data-parallel rank."""
    return {name: whole.chunk(dp)[dp_coord].contiguous() for name, whole in batch.items()}


def generator_of(seed: int, number: int, purpose: int) -> torch.Generator:
    """For one purpose of one step; the same on all ranks."""
    mixed = hash((seed, number, purpose)) % 2**63  # of integers: the same everywhere
    return torch.Generator().manual_seed(mixed)
