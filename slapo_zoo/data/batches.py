"""Batches of every step, whatever the number of ranks: from a data set (`Batches`), or from a stream (`Stream`)."""

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slapo_zoo.data.tasks import IGNORED, DataError, Task
from slapo_zoo.parallel.ranks.agreement import once_for_all

ORDER, CHANCE, EVALUATION = 0, 1, 2  # purposes of `generator_of`
SAMPLE = 4096  # rows in the checksum


@dataclass(frozen=True)
class Batches:
    """Batches of a data set that is in memory or memory-mapped; a batch depends only on the seed and the step.

    Args:
        rows: `datasets.Dataset` of tokenized rows.
        task: Task whose method `collate` makes a batch from rows.
        batch_size: rows per step, over all data-parallel ranks together.
        seed: seed of the order of the rows, and of which tokens are masked.
    """

    rows: Any
    task: Task
    batch_size: int
    seed: int

    def part(self, step: int, dp_coord: int = 0, dp: int = 1) -> dict[str, Tensor]:
        """Return the batch {name: [rows, ...]} of step `step` for data-parallel rank `dp_coord` of `dp`.

        Every epoch reads all rows in a new order; rows that fill no whole batch are skipped.
        """
        epoch, turn = divmod(step, len(self.rows) // self.batch_size)
        order = order_of(self.seed, epoch, len(self.rows))
        rows = self.rows[order[turn * self.batch_size : (turn + 1) * self.batch_size].tolist()]
        batch = self.task.collate(rows, generator_of(self.seed, step, CHANCE))
        return part_of(batch, dp_coord, dp)

    def evaluation_batches(self, most: int | None = None) -> int:
        """Return the number of batches of one evaluation, at most `most`; None counts those of all rows.

        The last batch may be short. It is left out if the task is contrastive, i.e. compares the rows of a batch.
        """
        size = self.batch_size
        count = len(self.rows) // size if self.task.couples else -(-len(self.rows) // size)
        return count if most is None else min(count, most)

    def evaluation_part(self, number: int, dp_coord: int = 0, dp: int = 1) -> dict[str, Tensor]:
        """Return {name: [rows, ...]}, the rows of data-parallel rank `dp_coord` of `dp` in evaluation batch `number`.

        Rows are in the order of the data. Rows whose labels are ignored fill a short last batch up to a multiple of `dp`.
        """
        begin = number * self.batch_size
        numbers = list(range(begin, min(begin + self.batch_size, len(self.rows))))
        batch = self.task.collate(self.rows[numbers], generator_of(self.seed, number, EVALUATION))
        if short := -len(numbers) % dp:
            more = {name: whole[-1:].repeat_interleave(short, 0) for name, whole in batch.items()}
            more["labels"] = torch.full_like(more["labels"], IGNORED)
            batch = {name: torch.cat([whole, more[name]]) for name, whole in batch.items()}
        return part_of(batch, dp_coord, dp)

    def position(self, step: int) -> dict[str, Any]:
        """Return {name: value} by which a resumed run checks its data: row count, settings, checksum; `step` is unused."""
        return {"rows": len(self.rows), **_settings(self), "text": checksum(self.rows)}

    def resume(self, position: Any) -> None:
        """Do nothing, unlike `Stream.resume`, because a batch depends only on the seed and its step."""


class Stream:
    """Batches of data that are read during training, one block of rows after the other; each block is shuffled.

    A checkpoint keeps the position in the data at which a block begins, so a resumed run, with any number of
    ranks, reads at most one block again.

    Args:
        source: a `Source`, which opens the data and yields tokenized rows.
        task: Task whose method `collate` makes a batch from rows.
        batch_size: rows per step, over all data-parallel ranks together.
        seed: seed of the order within a block, and of which tokens are masked.
        block: rows per block, rounded down to whole batches.
    """

    def __init__(self, source: Any, task: Task, batch_size: int, seed: int, block: int):
        self.source, self.task = source, task
        self.batch_size, self.seed = batch_size, seed
        self.steps = max(1, block // batch_size)  # steps per block
        self.start: dict[str, Any] = {"block": 0, "epoch": 0, "source": None}
        self.next: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self.reader: Iterator[Any] | None = None  # its next row begins the next block

    def part(self, step: int, dp_coord: int = 0, dp: int = 1) -> dict[str, Tensor]:
        """Return the batch {name: [rows, ...]} of a step for data-parallel rank `dp_coord` of `dp`.

        All ranks must call this with the same, ascending steps: in the first step of each block (`block` rows, shuffled
        together) rank 0 reads the block and sends it to all ranks.
        """
        block, turn = divmod(step, self.steps)
        if self.next is None:
            self._read()
        while self.start["block"] < block and self.next is not None:
            self.start = self.next
            self._read()
        order = torch.randperm(len(self.rows), generator=generator_of(self.seed, block, ORDER))
        numbers = order[turn * self.batch_size : (turn + 1) * self.batch_size].tolist()
        rows = {name: [self.rows[i][name] for i in numbers] for name in self.rows[0]}
        return part_of(self.task.collate(rows, generator_of(self.seed, step, CHANCE)), dp_coord, dp)

    def position(self, step: int) -> dict[str, Any]:
        """Return {name: value} that a checkpoint keeps to resume at `step`: "seq_len", "seed", ..., "block_steps"
        (steps per block of rows), and "at", the position in the data at which the step's block begins.
        """
        at = self.next if self.next and step // self.steps > self.start["block"] else self.start
        return {**_settings(self), "block_steps": self.steps, "at": at}

    def resume(self, position: Any) -> None:
        """Continue with the block (rows that are shuffled together) that is stored in `position`, a result of the
        method `position` from a checkpoint; the block is read again from its first row.
        """
        self.start, self.next, self.reader = position["at"], None, None

    def _read(self) -> None:
        """Read the next block of rows (`self.steps` batches), which begins at the position `self.start` in the data, on
        rank 0; send it to all ranks, which call this together. After its last row, the data begin again.
        """
        self.rows, self.next = once_for_all("reading data", self._block)

    def _block(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.reader = self.reader or self._endless()
        found = list(itertools.islice(self.reader, self.steps * self.batch_size))
        _, epoch, data = found[-1]
        place = {"block": self.start["block"] + 1, "epoch": epoch, "source": data.state_dict()}
        return [row for row, _, _ in found], place

    def _endless(self) -> Iterator[tuple[dict[str, Any], int, Any]]:
        """Yield (row, number of its epoch, iterable data set that has the row) from `self.start` on, without end."""
        epoch, place = self.start["epoch"], self.start["source"]
        while True:
            data, is_empty = self.source.opened(), place is None
            if place is not None:
                data.load_state_dict(place)
            for row in self.source.rows(data):
                is_empty = False
                yield dict(row), epoch, data
            if is_empty:
                hint = "give more text or a smaller seq_len: these data are empty, or too short to fill one row"
                raise DataError(self.source.name, f"split {self.source.split!r}", "found no row", hint)  # fmt: skip
            epoch, place = epoch + 1, None


def _settings(batches: Batches | Stream) -> dict[str, Any]:
    """Return the settings of `batches` that, with the data, determine the rows of a step: seq_len, seed, ..."""
    task = batches.task
    return {"seq_len": task.seq_len, "batch_size": batches.batch_size, "seed": batches.seed, "task": type(task).__name__}  # fmt: skip


@lru_cache(maxsize=1)
def order_of(seed: int, epoch: int, count: int) -> Tensor:
    """Return the row numbers [count] of an epoch, shuffled by `seed`; cached, as shuffling many rows takes a second."""
    return torch.randperm(count, generator=generator_of(seed, epoch, ORDER))


def part_of(batch: dict[str, Tensor], dp_coord: int, dp: int) -> dict[str, Tensor]:
    """Return, of the `batch` of all `dp` data-parallel ranks, {name: [rows, ...]} with the rows of rank `dp_coord`."""
    return {name: whole.chunk(dp)[dp_coord].contiguous() for name, whole in batch.items()}


def generator_of(seed: int, number: int, purpose: int) -> torch.Generator:
    """Return a random generator, equal on all ranks, seeded by the arguments. `number` is the index of a step, epoch,
    block or evaluation batch; `purpose` is ORDER (of rows), CHANCE (which tokens are masked) or EVALUATION.
    """
    mixed = hash((seed, number, purpose)) % 2**63  # of integers: the same everywhere
    return torch.Generator().manual_seed(mixed)


def divided(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Divide `rows`, a `datasets.Dataset`, at random by `seed`; return (training, held-out rows), in their old order.

    `share`, from 0 to 1, is the fraction of the rows that is held out for evaluation.
    """
    order, count = np.random.default_rng(seed).permutation(len(rows)), round(share * len(rows))
    rest, held = (np.sort(part) for part in (order[count:], order[:count]))
    return rows.select(rest, keep_in_memory=True), rows.select(held, keep_in_memory=True)


def checksum(rows: Any) -> int:
    """Return a checksum of `rows`, a `datasets.Dataset`; of more than SAMPLE (4096) rows, SAMPLE evenly spaced ones."""
    numbers = np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))
    found = 0
    for name, column in sorted(rows[numbers.tolist()].items()):
        array = np.concatenate([np.ravel(value) for value in column]).astype(np.int64)
        found = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), found))
    return found
