"""One measurement in a process of its own: it may run out of memory, hang or die, and nothing else does."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result, out, err = (Path(place) / name for name in ("result.json", "out", "err"))
        variables = {**os.environ, **(environment or {}), RESULT: str(result)}
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(  # noqa: S603 - the command is the user's own
                command, stdout=to_out, stderr=to_err, stdin=subprocess.DEVNULL, env=variables, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # on Ctrl+C too: nothing is left behind
        seconds = time.monotonic() - begin
        printed, text = (path.read_text(errors="replace")[-MOST_TEXT:] for path in (out, err))
        if code is None:
            return Outcome(
                TIMEOUT, message=f"still running after {timeout_s:g} s", seconds=seconds
            ), printed
        if result.exists():
            return replace(
                Outcome.from_dict(json.loads(result.read_text())), seconds=seconds
            ), printed
        if code != 0:
            return replace(failure_of(code, text or printed), seconds=seconds), printed
        return None, printed


def _end(process: subprocess.Popen) -> None:
    """End the session that we started, ranks of the trial included."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure_in_worker(job: Mapping[str, Any], timeout_s: float) -> Outcome:
    """Measure a job (see `trial.Job`) in a fresh interpreter."""
    command = [sys.executable, "-m", "slapo_zoo.tune.trial", json.dumps(job)]
    outcome, _ = run_trial(command, timeout_s, {"OMP_NUM_THREADS": str(job.get("threads") or 1)})
    return outcome or failure_of(0, "")
