"""Rows by number: cut from one stream of tokens, or examples as they are."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

SAMPLE = 4096  # rows that tell one text from another


class Rows(Protocol):
    """Whatever has a length, and gives the columns of the rows that a list of numbers names."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: list[int], /) -> Mapping[str, Any]: ...


class Chosen:
    """Some of the rows of another."""

    def __init__(self, rows: Rows, numbers: np.ndarray):
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, numbers: list[int]) -> Mapping[str, Any]:
        return self.rows[self.numbers[numbers].tolist()]


def divided(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """All but a share of the rows, and that share, drawn by the seed."""
    order = np.random.default_rng(seed).permutation(len(rows))
    count = round(share * len(rows))
    return Chosen(rows, np.sort(order[count:])), Chosen(rows, np.sort(order[:count]))


class Packed:
    """Rows of equal length, cut from the tokens of all documents, one after the other.

    Args:
        chunks: the tokens; pieces of a mapped file stay there.
        lengths: tokens of each document.
        row: tokens of a row.
    """

    def __init__(self, chunks: Sequence[np.ndarray], lengths: np.ndarray, row: int):
        self.chunks, self.row = chunks, row
        self.starts = np.cumsum([0, *map(len, chunks)])
        self.ends = np.cumsum(lengths)

    @property
    def tokens(self) -> int:
        """Return the tokens of all documents."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        return self.tokens // self.row if self.row > 0 else 0

    def __getitem__(self, numbers: list[int]) -> dict[str, np.ndarray]:
        ids = [self._tokens(number * self.row, (number + 1) * self.row) for number in numbers]
        places = [self._places(number * self.row) for number in numbers]
        shape = (len(numbers), self.row)
        return {
            "input_ids": np.asarray(ids, dtype=np.int64).reshape(shape),
            "position_ids": np.asarray(places, dtype=np.int64).reshape(shape),
        }

    def _tokens(self, begin: int, end: int) -> np.ndarray:
        chunk = int(np.searchsorted(self.starts, begin, "right")) - 1
        parts = []
        while begin < end:
            stop = min(end, int(self.starts[chunk + 1]))
            parts.append(self.chunks[chunk][begin - self.starts[chunk] : stop - self.starts[chunk]])
            begin, chunk = stop, chunk + 1
        return np.concatenate(parts)

    def _places(self, begin: int) -> np.ndarray:
        """Return the position of each token in its document, or in the part of the document that the row holds."""
        first, last = np.searchsorted(self.ends, [begin, begin + self.row], "right")
        return places_of(self.ends[first:last] - begin, self.row)


def places_of(ends: np.ndarray, length: int) -> np.ndarray:
    """Numbers from 0 that begin anew where a document has ended."""
    begins = np.zeros(length, dtype=np.int64)
    inner = ends[ends < length]
    begins[inner] = inner
    return np.arange(length) - np.maximum.accumulate(begins)


def checksum(rows: Rows) -> int:
    """Hash all rows, or a sample of a large data set that tells it from another one."""
    numbers = np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64))
    found = 0
    for name, column in sorted(rows[numbers.tolist()].items()):
        array = np.concatenate([np.ravel(value) for value in column])
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), found))
    return found
