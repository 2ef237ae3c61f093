"""Every kernel against the operations that it replaces (slapo_zoo/dispatch/benchmark.py); `--only NAME`: kernels
whose names begin with NAME.
"""

from typing import Any

from slapo_zoo.dispatch import benchmark as kernel_times
from slapo_zoo.dispatch.tables import MEASURED

ONLY = ""


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Measure the kernels, and write the results to the table in the checkout; return {title: rows}."""
    return kernel_times.run(quick, ONLY, MEASURED)
