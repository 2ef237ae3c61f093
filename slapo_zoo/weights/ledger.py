"""Ledger of a load: tensors, bytes, files, seconds, peak memory."""

import mmap
import os
import shutil
import textwrap
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SMAPS, STATM = Path("/proc/self/smaps_rollup"), Path("/proc/self/statm")
PAGE = mmap.PAGESIZE


def anonymous_bytes() -> int:
    """Anonymous memory of this process in bytes; 0 where the kernel does not tell.

    Resident memory would count the mapped pages of the checkpoint, which cost nothing.
    """
    try:
        text = SMAPS.read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Anonymous:")), "0 0")
    return int(line.split()[1]) * 1024


class AnonymousPeak:
    """Watch anonymous memory: `with AnonymousPeak() as peak: ...; peak.growth`.

    A thread glances at the kernel's counter, which costs a microsecond but lags by some pages per
    core before Linux 6.17; the exact figure, for which the kernel walks all page tables, takes
    tens of milliseconds.

    Args:
        exact: take the exact figure too, at both ends.

    Attributes:
        growth: bytes by which the process grew over what it held at entry, at most.
    """

    INTERVAL = 0.002

    def __init__(self, exact: bool = True) -> None:
        self.growth, self._exact = 0, exact
        self._statm = self._counted = -1
        self._done, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="anonymous-peak", daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        self._before = anonymous_bytes() if self._exact else 0
        try:
            self._statm = os.open(STATM, os.O_RDONLY)
        except OSError:
            return self
        self._counted = self._now()
        self._thread.start()
        return self

    def _now(self) -> int:
        """Resident bytes that are no pages of files or shared memory."""
        _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
        return (int(resident) - int(shared)) * PAGE

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._statm >= 0:
            self._thread.join()
            self._glance()
            os.close(self._statm)
        if self._exact:
            self.growth = max(self.growth, anonymous_bytes() - self._before)

    def _watch(self) -> None:
        while not self._done.wait(self.INTERVAL):
            self._glance()

    def _glance(self) -> None:
        grown = self._now() - self._counted
        with self._lock:  # two threads glance; the smaller figure must not come last
            self.growth = max(self.growth, grown)


@dataclass
class Ledger:
    """Record of one load on this rank.

    Args:
        tensors: number of local tensors filled from files.
        bytes_read: bytes of the slices read, in the dtype of the files; those of `mapped` tensors
            count, although the kernel fetches them when they are first used.
        shard_bytes: bytes of this rank's own tensors, in the dtype of the model.
        files_opened: number of weight files opened.
        seconds: wall time.
        peak_anonymous: growth of anonymous memory over the process before the load, at its peak.
        newly_initialized: names that no file holds.
        unexpected: keys of the files that the model has no place for.
        mapped: names of tensors that are still pages of the files; `train()` makes them memory.
    """

    tensors: int = 0
    bytes_read: int = 0
    shard_bytes: int = 0
    files_opened: int = 0
    seconds: float = 0.0
    peak_anonymous: int = 0
    newly_initialized: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mapped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors, {human(self.bytes_read)} read from "
            f"{self.files_opened} file{'' if self.files_opened == 1 else 's'} in {self.seconds:.2f} s"
            f" into {human(self.shard_bytes)}; peak anonymous +{human(self.peak_anonymous)}; "
            f"{len(self.newly_initialized)} newly initialized, {len(self.unexpected)} unexpected"
        )


def human(size: float) -> str:
    """A size as a person reads it: 1536 --> "1.5 KB", decimal units as in file listings.

    >>> human(999), human(1_500_000)
    ('999 B', '1.5 MB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def filled(text: str) -> str:
    """Break the lines of a text between words where the terminal is narrower."""
    fill = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    ).fill  # fmt: skip
    return "\n".join(map(fill, text.split("\n")))


def as_table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return aligned columns; where the terminal is narrower, a list: no word is broken.

    Args:
        title: a line above.
        names: of the columns.
        rows: a cell of each column; an empty one, or "-", is left out of a list.
    """
    lines = [[*names], *([str(cell) for cell in row] for row in rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    width = shutil.get_terminal_size().columns
    if sum(sizes) + 2 * (len(sizes) - 1) <= width:
        cells = [[c.ljust(n) for c, n in zip(line, sizes, strict=True)] for line in lines]
        text = ["  ".join(line).rstrip() for line in cells]
        text.insert(1, "-" * max(map(len, text)))
    else:
        items = ["- " + ", ".join(f"{name} {cell}" for name, cell in zip(names, line, strict=True)
                           if cell not in ("", "-")) for line in lines[1:]]  # fmt: skip
        text = [filled(item) for item in items]
    return "\n".join([filled(title), *text, ""])
