"""One measurement in a process of its own: it may run out of memory, hang or die, and nothing else does."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_zoo.ranks.apart import ProcessApart
from slapo_zoo.tune.outcome import TIMEOUT, Outcome, failure_of

MOST_TEXT = 20_000  # characters of stderr that are looked at
RESULT = "SLAPO_ZOO_RESULT"  # environment variable: where a trial writes its outcome


def run_trial(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Outcome | None, str]:  # fmt: skip
    """Run a command in a new session; its outcome where it wrote one or failed, and what it printed.

    Args:
        command: program and arguments; no shell.
        timeout_s: it and all that it started are ended after so many seconds.
        environment: variables beside those of this process.
        folder: where it runs.
    """
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        variables = {**os.environ, **(environment or {}), RESULT: str(result)}
        ended = ProcessApart(command, "", variables, folder).wait(timeout_s)
        printed, text = ended.out[-MOST_TEXT:], ended.err[-MOST_TEXT:]
        found = None
        if ended.code is None:
            found = Outcome(TIMEOUT, message=f"still running after {timeout_s:g} s")
        elif result.exists():
            found = Outcome.from_dict(json.loads(result.read_text()))
        elif ended.code != 0:
            found = failure_of(ended.code, text or printed)
    return found and replace(found, seconds=ended.seconds), printed


def measure_in_worker(job: Mapping[str, Any], timeout_s: float) -> Outcome:
    """Measure a job (see `trial.Job`) in a fresh interpreter."""
    command = [sys.executable, "-m", "slapo_zoo.tune.trial", json.dumps(job)]
    outcome, _ = run_trial(command, timeout_s, {"OMP_NUM_THREADS": str(job.get("threads") or 1)})
    return outcome or failure_of(0, "")
