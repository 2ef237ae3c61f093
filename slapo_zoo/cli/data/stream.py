"""Batches of data that are read while training goes on: nothing is held but a block of rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slapo_zoo.cli.data.batches import CHANCE, ORDER, generator_of, part_of
from slapo_zoo.cli.data.rows import places_of
from slapo_zoo.cli.data.tasks import Task
from slapo_zoo.cli.data.text_files import DataError
from slapo_zoo.parallel.ranks.agreement import once_for_all


class Stream:
    """Blocks of rows in the order in which they are read; within a block the seed decides.

    Where a block begins is known as a place in the data and a number of tokens of the document
    there, so that a run that is resumed, on any layout, reads no more than one block again.

    Args:
        source: of examples.
        task: makes batches of rows.
        batch_size: rows per step, over all data-parallel ranks together.
        seed: of the order within a block, and of masks.
        block: rows of a block, about.
    """

    def __init__(self, source: Any, task: Task, batch_size: int, seed: int, block: int):
        self.source, self.task = source, task
        self.batch_size, self.seed = batch_size, seed
        self.steps = max(1, block // batch_size)  # of a block
        self.start: dict[str, Any] = {"block": 0, "epoch": 0, "source": None, "skip": 0}
        self.next: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []

    def part(self, step: int, dp_coord: int = 0, dp: int = 1) -> dict[str, Tensor]:
        """The batch of one data-parallel rank; steps come one after the other."""
        block, turn = divmod(step, self.steps)
        if self.next is None:
            self._read()
        while self.start["block"] < block and self.next is not None:
            self.start = self.next
            self._read()
        order = torch.randperm(len(self.rows), generator=generator_of(self.seed, block, ORDER))
        picked = [self.rows[i] for i in order[turn * self.batch_size : (turn + 1) * self.batch_size]]  # fmt: skip
        rows = {name: [row[name] for row in picked] for name in picked[0]}
        if self.task.packs:
            rows = {name: np.stack(column) for name, column in rows.items()}
        return part_of(self.task.collate(rows, generator_of(self.seed, step, CHANCE)), dp_coord, dp)

    def position(self, step: int) -> dict[str, Any]:
        """Where the block of a step begins, which is not yet read where the last one is done."""
        at = self.next if self.next and step // self.steps > self.start["block"] else self.start
        return {
            "seq_len": self.task.seq_len, "batch_size": self.batch_size, "seed": self.seed,
            "block_steps": self.steps, "task": type(self.task).__name__, "at": at,
        }  # fmt: skip

    def resume(self, position: Any) -> None:
        """Go on where the block of that position begins."""
        self.start, self.next = position["at"], None

    def _read(self) -> None:
        """The block that starts at `start`; it is read and tokenised once, for all ranks."""
        self.rows, self.next = once_for_all("reading data", self._block)

    def _block(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        wanted, rows, at = self.steps * self.batch_size, [], dict(self.start)
        cut = self._packed if self.task.packs else self._examples
        for row, place in cut(at):
            rows.append(row)
            if len(rows) == wanted:
                return rows, {**place, "block": self.start["block"] + 1}
        raise AssertionError("documents have no end")

    def _documents(self, at: dict[str, Any]) -> Iterator[tuple[dict[str, list[Any]], dict[str, Any]]]:  # fmt: skip
        """Encoded examples from a place on, for ever, each with the place before it."""
        epoch, source = at["epoch"], at["source"]
        while True:
            data = self.source.opened()
            if source is not None:
                data.load_state_dict(source)
            before, seen = {"epoch": epoch, "source": source}, False
            for example in self.source.examples(data):
                found = self.source.encode(example)
                if len(next(iter(found.values()), [])):
                    seen = True
                    yield found, before
                before = {"epoch": epoch, "source": data.state_dict()}
            if not seen and source is None:
                raise DataError("--data", "", "found no row in it", "is it empty, or without text?")
            epoch, source = epoch + 1, None

    def _examples(self, at: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Rows, each with the place after it."""
        documents = self._documents(at)
        found, _ = next(documents)
        for following, place in documents:
            yield {name: column[0] for name, column in found.items()}, {**place, "skip": 0}
            found = following

    def _packed(self, at: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Rows cut from the documents' tokens, each with the place after it."""
        held, ends, size, skip = [], [], 0, at["skip"]
        width = self.task.row_tokens
        for found, place in self._documents(at):
            tokens = np.asarray(found["input_ids"][0], dtype=np.int64)
            used = skip
            while used < len(tokens):
                part = tokens[used : used + width - size]
                held.append(part)
                size, used = size + len(part), used + len(part)
                if used == len(tokens):
                    ends.append(size)
                if size == width:
                    places = places_of(np.array(ends, dtype=np.int64), width)
                    row = {"input_ids": np.concatenate(held), "position_ids": places}
                    yield row, {**place, "skip": used}
                    held, ends, size = [], [], 0
            skip = 0
