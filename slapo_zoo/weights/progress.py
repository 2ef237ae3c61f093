"""A progress bar for bytes: on a terminal, on one rank, and only when there is a while to wait."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnBytes = Callable[[int], None]
LEAST = 256 << 20  # less is there before a person has seen the bar


@contextmanager
def byte_progress(what: str, total: int, visible: bool = True) -> Iterator[OnBytes]:
    """Yield a function to be called with the bytes that were done since the last call.

    Args:
        what: shown before the bar.
        total: bytes in all.
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
