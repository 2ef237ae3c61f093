"""Differences of gradients at a kink, e.g. of a ReLU whose input rounds to another side of 0, which are no mistakes."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

SEEDS = range(8)  # of the noise in further runs
SMALL = 0.1  # of the largest gradient: what a few such inputs can change
CHECKS = {"gradients", "optimizer step", "dropout"}


def drop_kinks(into: Any, check: Callable[[Any, Any], None], run: Callable[[int], Any]) -> None:
    """Delete all differences in `into` if they are small (at most 0.1 of the largest gradient) and one of up to 8 more
    runs, each with noise of one ulp in all weights, has none. An input of a ReLU that is 1e-8 in the plain model can
    round to -1e-8 in the sharded one, which is no mistake, while a wrong schedule differs in every run. If ranks are
    processes, nothing is done, since some ranks may have found no difference.

    Args:
        into: Comparison with the differences of the first run.
        check: function (a Comparison, results of `run`) that adds to the Comparison what differs from the plain model.
        run: function (seed) that runs the sharded model with noise from the seed on every parameter, on all ranks.
    """
    kinds = {finding.check for finding in into.findings}
    if dist.is_initialized() or not kinds or kinds - CHECKS or into.apart > SMALL:
        return
    for seed in SEEDS:
        again = type(into)()
        check(again, run(seed))
        if not again.findings:
            into.findings, into.factor = [], None
            into.worst |= again.worst
            return
