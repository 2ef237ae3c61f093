"""Activations of a pipeline that one rank holds, by its order."""

from collections.abc import Callable, Sequence

from slapo_zoo.pipeline.timeline import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action


def most_in_flight(
    actions: Sequence[Action], size: Callable[[int], float] = lambda stage: 1.0
) -> float:
    """Return the largest sum of activations that one rank holds at a time.

    Args:
        actions: of the rank, in order.
        size: of one micro-batch's activations in a stage. They live from the forward to the
            backward (of weights, where it runs apart).
    """
    now = most = 0.0
    for action in actions:
        if action.kind == FORWARD:
            now += size(action.stage)
            most = max(most, now)
        elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
            now -= size(action.stage)
    return most
