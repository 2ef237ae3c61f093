"""What one unit of a model costs in a training step, as plain numbers that scale with the rows."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """One call of a unit on one tp rank, for a micro-batch.

    The peaks are counted above what was alive when the forward of the unit began (and, for the
    backward, above the gradients of parameters).

    Args:
        forward_flops: of matrix products and attention.
        forward_moved: bytes that all other operations read and write.
        forward_ops: operations that write memory.
        forward_comm: bytes that cross the tp ranks.
        backward_flops: the same of the backward.
        backward_moved: the same of the backward.
        backward_ops: the same of the backward.
        backward_comm: the same of the backward.
        kept: bytes that the forward leaves alive.
        matmuls: bytes of its results of matrix products and fused attention.
        output: bytes that it returns and that no unit before returned.
        forward_peak: most bytes alive in its forward.
        backward_peak: most bytes alive in its backward.
        backward_growth: the same with the gradients of its own parameters.
        received: bytes that a stage receives which begins with this unit.
    """

    forward_flops: float = 0.0
    forward_moved: float = 0.0
    forward_ops: float = 0.0
    forward_comm: float = 0.0
    backward_flops: float = 0.0
    backward_moved: float = 0.0
    backward_ops: float = 0.0
    backward_comm: float = 0.0
    kept: float = 0.0
    matmuls: float = 0.0
    output: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    backward_growth: float = 0.0
    received: float = 0.0

    def toward(self, other: "Use", share: float) -> "Use":
        """The point at `share` of the way from here to the other; beyond 1 it is extrapolated."""
        return Use(
            *(a + (b - a) * share for a, b in zip(_values(self), _values(other), strict=True))
        )


def _values(use: Use) -> tuple[float, ...]:
    return tuple(getattr(use, field.name) for field in dataclasses.fields(use))
