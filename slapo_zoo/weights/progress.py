"""Progress bar for bytes: only on a terminal, on one rank, and for long operations."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnBytes = Callable[[int], None]
LEAST = 256 << 20  # bytes; less is loaded too fast to see a bar


@contextmanager
def byte_progress(what: str, total: int, visible: bool = True) -> Iterator[OnBytes]:
    """Yield a function that advances a progress bar; it is called with the number of bytes done since its last call.

    Args:
        what: text before the bar.
        total: total bytes; below LEAST no bar is shown.
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
