"""Verification in a child process, so that this process's group stays as it is and a crash ends only the child."""

import signal
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.ranks.apart import python_apart

TIMEOUT_S = 600.0
CHILD = "slapo_zoo.verify.child"


def verify_apart(request: dict[str, Any]) -> dict[str, Any]:
    """Verify in a fresh process on the CPU, and return the JSON document that this process wrote.

    Args:
        request: JSON data: "config", "cls" (name of the class), "mesh", "program" (a schedule.json), "knobs",
            "quick", ...; see `child.answer`.

    Raises:
        SlapoError: the child process raised one (it is raised again here), or ended without a report.
    """
    done = python_apart(CHILD, request).wait(TIMEOUT_S)
    if done.code is None:
        problem = f"the process that verifies gave no report within {TIMEOUT_S:.0f} s"
        raise SlapoError("verify", "", problem, "verify a smaller model")
    found = done.document()
    if found is None:
        killed = done.code == -signal.SIGKILL
        hint = (
            "memory ran out: verify a smaller model"
            if killed
            else "see the output of the process above: a rank may have crashed in a collective"
        )
        raise SlapoError("verify", "", done.last_words(), hint)
    if "error_of" in found:
        raise SlapoError(*found["error_of"])
    return found
