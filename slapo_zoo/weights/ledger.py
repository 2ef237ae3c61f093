"""Record of a load (tensors, bytes, files, seconds, memory), its progress bar, and formatting of sizes and tables."""

import mmap
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SMAPS, STATM = Path("/proc/self/smaps_rollup"), Path("/proc/self/statm")
PAGE = mmap.PAGESIZE
OnBytes = Callable[[int], None]
LEAST = 256 << 20  # bytes; less is loaded too fast to see a bar


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes; 0 where the kernel does not report it.

    Resident memory would also count mapped pages of the checkpoint, which the kernel can drop.
    """
    try:
        text = SMAPS.read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Anonymous:")), "0 0")
    return int(line.split()[1]) * 1024


class AnonymousPeak:
    """Context that measures the peak of anonymous memory: `with AnonymousPeak() as peak: ...; peak.growth`.

    A thread polls a counter of the kernel, which takes a microsecond but lags by some pages per core before
    Linux 6.17. The exact figure, for which the kernel walks all page tables, takes tens of milliseconds.

    Args:
        exact: also read the exact figure on entry and exit.

    Attributes:
        growth: largest growth in bytes since entry.
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
        """Return the resident bytes of this process, not counting mapped files and shared memory."""
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
        with self._lock:  # two threads poll
            self.growth = max(self.growth, grown)


@dataclass
class Ledger:
    """Record of one load on this rank.

    Args:
        tensors: number of local tensors filled from files.
        bytes_read: bytes of the slices read, in the dtype of the files; includes `mapped` tensors, although the
            kernel fetches them on first use.
        shard_bytes: bytes of this rank's tensors, in the dtype of the model.
        files_opened: number of weight files opened.
        seconds: wall time.
        peak_anonymous: peak growth of the process's anonymous memory during the load, in bytes.
        newly_initialized: names of tensors that no file holds.
        unexpected: keys of the files that fill no tensor of the model.
        mapped: names of tensors that are still mapped pages of the files; `train()` copies them to memory.
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
    """Format a size in bytes in decimal units: 1536 --> "1.5 KB".

    >>> human(999), human(1_500_000)
    ('999 B', '1.5 MB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def filled(text: str) -> str:
    """Wrap the lines of a text at the width of the terminal, without breaking words."""
    fill = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    ).fill  # fmt: skip
    return "\n".join(map(fill, text.split("\n")))


def as_table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a text table with aligned columns; where the terminal is too narrow, return a list instead.

    Args:
        title: line above the table.
        names: names of the columns.
        rows: values of each row, one per column; the list leaves out "" and "-".
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


@contextmanager
def byte_progress(what: str, total: int, visible: bool = True) -> Iterator[OnBytes]:
    """Yield a function that advances a progress bar; it is called with the number of bytes done since its last call.

    Args:
        what: text before the bar.
        total: total bytes; below LEAST (256 MiB) no bar is shown.
        visible: False on all ranks but one.
    """
    if not visible or total < LEAST or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
