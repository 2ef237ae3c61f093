"""Outcome of one tuning measurement: throughput and memory, or the kind of failure."""

import signal
from dataclasses import dataclass

OK, OUT_OF_MEMORY, CRASH, TIMEOUT, WRONG, SLOW = KINDS = (
    "ok", "out_of_memory", "crash", "timeout", "wrong", "slow",
)  # fmt: skip
NO_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "outofmemoryerror", "memoryerror",
    "not enough memory",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Throughput and memory of one configuration, or why it failed.

    Args:
        kind: "ok", "out_of_memory", "crash", "timeout", "wrong" (its loss is not that of one rank with
            reference kernels) or "slow" (stopped after the first steps).
        throughput: rows per second; 0.0 where nothing was measured.
        peak_memory: bytes of the rank that used most; 0 where unknown.
        steps: number of training steps that were timed.
        message: the error in one line.
        seconds: duration of the whole measurement, start of the process included.
    """

    kind: str
    throughput: float = 0.0
    peak_memory: int = 0
    steps: int = 0
    message: str = ""
    seconds: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Return whether the configuration ran, so that `throughput` is valid: kind "ok" or "slow"."""
        return self.kind in (OK, SLOW)


def failure_of(returncode: int, text: str) -> Outcome:
    """Return the outcome (kind of failure, message) of a worker process that ended without writing one.

    Args:
        returncode: exit code as `subprocess` gives it; negative for a signal.
        text: stderr of the process.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if any(word in text.lower() for word in NO_MEMORY):
        found = next(line for line in reversed(lines) if any(w in line.lower() for w in NO_MEMORY))
        return Outcome(OUT_OF_MEMORY, message=found[:300])
    if returncode == -signal.SIGKILL:
        return Outcome(OUT_OF_MEMORY, message="killed: the kernel does so when memory runs out")
    if returncode < 0:
        return Outcome(CRASH, message=f"died of {signal.Signals(-returncode).name}: {last}"[:300])
    return Outcome(
        CRASH, message=(last or f"ended with exit code {returncode} and no result")[:300]
    )
