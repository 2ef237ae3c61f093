"""Run one measurement in its own process, so that a crash, a hang or a lack of memory ends only that process."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_zoo.parallel.ranks.apart import ProcessApart
from slapo_zoo.tune.outcome import TIMEOUT, Outcome, failure_of

MOST_TEXT = 20_000  # characters of stderr that are searched for the cause
RESULT = "SLAPO_ZOO_RESULT"  # environment variable: where a trial writes its outcome


def run_trial(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command in a new session; return the outcome that it wrote, or how it failed.

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
    """Measure a job, given as the JSON form of `trial.Job` (model, point, steps, ...), in a fresh
    Python process that is killed after `timeout_s` seconds.
    """
    command = [sys.executable, "-m", "slapo_zoo.tune.trial", json.dumps(job)]
    return run_trial(command, timeout_s, {"OMP_NUM_THREADS": str(job["point"].get("threads") or 1)})
