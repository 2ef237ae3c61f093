"""Outcome of one tuning measurement: throughput and memory, or the kind of failure.

A measurement runs in its own process, so that a crash, a hang or a lack of memory ends only that process.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slapo_zoo.parallel.ranks.apart import ProcessApart

MOST_TEXT = 20_000  # characters of stderr that are searched for the cause
RESULT = "SLAPO_ZOO_RESULT"  # environment variable: where a trial writes its outcome
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
        kind: "ok", "out_of_memory", "crash", "timeout", "wrong" (the loss differs, beyond rounding, from that
            of one rank with reference kernels) or "slow" (low throughput in a first, short measurement; no full one).
        throughput: rows per second; 0.0 where nothing was measured.
        peak_memory: bytes of the rank that used most; 0 where unknown.
        steps: number of training steps that were timed.
        message: the error in one line; for kind "ok" the loss on a small random batch, the probe; for "slow" how slow.
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
    """Return the outcome, with kind of failure and message, of a worker process that ended without writing its outcome.

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
    message = last or f"ended with exit code {returncode} and no result"
    return Outcome(CRASH, message=message[:300])


def run_trial(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run the command of a tuning measurement in a new session; return the outcome that the command wrote as JSON into
    the file that the environment variable SLAPO_ZOO_RESULT names, or else an outcome that says how it failed.

    Args:
        command: program and arguments; no shell.
        timeout_s: seconds after which the command and its children are killed.
        environment: variables added to those of this process.
    """
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        variables = {**os.environ, **(environment or {}), RESULT: str(result)}
        ended = ProcessApart(command, "", variables).wait(timeout_s)
        if ended.code is None:
            found = Outcome(TIMEOUT, message=f"still running after {timeout_s:g} s")
        elif result.exists():
            found = Outcome(**json.loads(result.read_text()))
        else:
            text = (ended.err or ended.out)[-MOST_TEXT:] if ended.code else ""
            found = failure_of(ended.code, text)
    return replace(found, seconds=ended.seconds)


def measure_in_worker(job: Mapping[str, Any], timeout_s: float) -> Outcome:
    """Measure a job, the JSON form of a `trial.Job` (model, configuration, steps, ...), in a fresh Python process that
    is killed after `timeout_s` seconds; return the outcome.
    """
    command = [sys.executable, "-m", "slapo_zoo.tune.trial", json.dumps(job)]
    return run_trial(command, timeout_s, {"OMP_NUM_THREADS": str(job["point"].get("threads") or 1)})
