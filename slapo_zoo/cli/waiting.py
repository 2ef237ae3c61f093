"""Progress lines on stderr for long work that prints nothing itself."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_S, EVERY_S = 5.0, 30.0  # seconds without a terminal; on one the line is updated


@contextmanager
def waiting(what: str, first_s: float = FIRST_S, every_s: float = EVERY_S) -> Iterator[None]:
    """Context that prints on stderr how many seconds its block has taken so far.

    Args:
        what: name of the work, which begins each line.
        first_s: seconds before the first line.
        every_s: seconds between lines; on a terminal one line is updated every second instead.
    """
    is_over, begin, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def tell() -> None:
        pause = first_s
        while not is_over.wait(pause):
            pause = 1.0 if terminal else every_s
            text = f"{what}: {time.monotonic() - begin:.0f} s"
            sys.stderr.write(f"\r{text}" if terminal else f"{text}\n")
            sys.stderr.flush()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if terminal:
            sys.stderr.write("\r\033[K")
