"""Comparison of a sharded model with the plain one in a child process, whose crash leaves this process as it is."""

import signal
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.ranks.apart import python_apart

TIMEOUT_S = 600.0
CHILD = "slapo_zoo.verify.child"
SMALLER = 'verify a smaller model, or without --full; a load of a card skips the check with verify="off"'  # fmt: skip


def verify_apart(request: dict[str, Any]) -> dict[str, Any]:
    """Compare a sharded model with the plain one in a child process on the CPU; return the child's report: "verdict"
    ("verified", "failed", or "unmeasured": the card fits no small model, and this one is large), "text" (the report in
    words) and, if it was measured, the fields of `Report`.

    Args:
        request: "config" (dict), "cls" (name of the class), "mesh" [tp, pp, dp], "program" (text of a card's
            schedule.json; None: the built-in schedule); optional "quick", "layers", "folder", "knobs": see
            `child.answer`.

    Raises:
        SlapoError: the child process raised one (it is raised again here), or ended without a report.
    """
    done = python_apart(CHILD, request).wait(TIMEOUT_S)
    if done.code is None:
        problem = f"the process that verifies gave no report within {TIMEOUT_S:.0f} s"
        raise SlapoError("verify", "", problem, SMALLER)
    found = done.document()
    if found is None:
        killed = done.code == -signal.SIGKILL
        hint = (
            f"memory ran out: {SMALLER}"
            if killed
            else "see the child's output above; slapo_zoo.verify(...) runs the same check in your own process"
        )
        raise SlapoError("verify", "", done.last_words(), hint)
    if "error_of" in found:
        raise SlapoError(*found["error_of"])
    return found
