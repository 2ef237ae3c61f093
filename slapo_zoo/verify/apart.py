"""A verification in a process of its own: it works beside any process group, and may crash alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from slapo_zoo.errors import SlapoError

TIMEOUT_S = 600.0
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
                "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")  # fmt: skip


def apart_environment() -> dict[str, str]:
    """The environment of a process that belongs to no launcher and sees no GPU."""
    env = {k: v for k, v in os.environ.items() if k not in OF_LAUNCHERS and "ELASTIC" not in k}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return env


def verify_apart(request: dict[str, Any]) -> dict[str, Any]:
    """The document of a verification that ran in a fresh process, on the CPU.

    Args:
        request: of `slapo_zoo.verify.child`.

    Raises:
        SlapoError: what that process raised, or that it ended without a report.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "slapo_zoo.verify.child"], input=json.dumps(request),
            capture_output=True, text=True, env=apart_environment(), timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problem = f"no report after {TIMEOUT_S:.0f} s"
        raise SlapoError("verify", "", problem, "verify a smaller model, or quickly") from None
    with contextlib.suppress(json.JSONDecodeError, IndexError):
        found = json.loads(done.stdout.splitlines()[-1])
        if "error_of" not in found:
            return found
        raise SlapoError(*found["error_of"])
    last = " / ".join(done.stderr.strip().splitlines()[-3:])
    problem = f"its process ended with exit status {done.returncode}: {last}"
    killed = done.returncode == -signal.SIGKILL
    hint = "the memory ran out" if killed else "a rank may have crashed in a collective"
    raise SlapoError("verify", "", problem, hint)
