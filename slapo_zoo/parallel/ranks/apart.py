"""Work in a separate process, so that a crash, a hang or a lack of memory ends only that process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
                "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a process that has ended.

    Args:
        code: exit status, negative for a signal; None if the process exceeded its time and was killed.
        out: text of its stdout.
        err: text of its stderr.
        seconds: time since its start.
    """

    code: int | None
    out: str
    err: str
    seconds: float

    def document(self) -> dict[str, Any] | None:
        """Return the JSON object in the last line of stdout; None if this line is no JSON object."""
        with suppress(ValueError, IndexError):
            found = json.loads(self.out.splitlines()[-1])
            return found if isinstance(found, dict) else None
        return None

    def last_words(self) -> str:
        """Return one line with the exit status and the last lines of stderr, for an error message."""
        last = " / ".join(self.err.strip().splitlines()[-3:])
        return f"its process ended with exit status {self.code}: {last}"


class ProcessApart:
    """A command that runs in a new process session, so that it can be killed with all its children.

    Args:
        command: program and arguments; no shell.
        text: content of its stdin.
        environment: all of its environment variables; None takes those of this process.
    """

    def __init__(
        self, command: Sequence[str], text: str = "", environment: Mapping[str, str] | None = None
    ):
        self.begin = time.monotonic()
        self.streams: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - open while it runs
        given, out, err = self.streams
        given.write(text.encode())
        given.seek(0)
        self.process = subprocess.Popen(  # noqa: S603 - the command is ours, or the user's own
            command, stdin=given, stdout=out, stderr=err, env=environment, start_new_session=True
        )

    def poll(self, timeout_s: float) -> Ended | None:
        """Return status and output if the process has ended, or has run for `timeout_s` seconds and is killed now; else None."""
        if self.process.poll() is not None:
            return self.end()
        return self.end() if time.monotonic() - self.begin > timeout_s else None

    def wait(self, timeout_s: float) -> Ended:
        """Wait until the process ends, or kill it after `timeout_s` seconds; return its status and output."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        finally:
            found = self.end()  # on Ctrl+C too: nothing is left behind
        return found

    def end(self) -> Ended:
        """Kill the process and its children, and return its status and output."""
        code = self.process.poll()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        texts = []
        for stream in self.streams:
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        return Ended(code, texts[1], texts[2], time.monotonic() - self.begin)


def python_apart(module: str, request: Mapping[str, Any]) -> ProcessApart:
    """Start `python -m module` in a new process on the CPU, with the JSON of `request` on its stdin.

    Environment variables of launchers are removed and GPUs hidden, so that the process is no rank of a running job.
    """
    env = {k: v for k, v in os.environ.items() if k not in OF_LAUNCHERS and "ELASTIC" not in k}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return ProcessApart([sys.executable, "-m", module], json.dumps(request), env)
