"""Every kernel against the code that it replaces; see slapo_zoo/dispatch/benchmark.py. `--only NAME`: names that begin with NAME."""

from typing import Any

from slapo_zoo.dispatch import benchmark as kernel_times
from slapo_zoo.dispatch.tables import MEASURED

ONLY = ""


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """The table, in the checkout."""
    return kernel_times.run(quick, ONLY, MEASURED)
