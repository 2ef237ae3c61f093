"""Throughput surfaces of 13 batch sizes and 7 checkpoint ratios with a region that does not fit."""

from slapo_zoo.tune.outcome import OK, OUT_OF_MEMORY, Outcome
from slapo_zoo.tune.space import Space

BATCHES = list(range(96, 193, 8))
RATIOS = [0.25, 0.34, 0.5, 0.67, 0.84, 0.92, 1.0]


class Surface:
    """A step takes `fixed` s, and `per_row` s a row, a third more for what is recomputed.

    Memory is what a row keeps, of which recomputation saves most; `limit` is in rows without it.
    """

    def __init__(self, per_row, fixed, limit):
        self.per_row, self.fixed, self.limit = per_row, fixed, limit

    def memory(self, point):
        return point["batch_size"] * (1 + 1.8 * (1 - point["ckpt_ratio"]))

    def __call__(self, point, steps=0):
        rows, ratio = point["batch_size"], point["ckpt_ratio"]
        if self.memory(point) > self.limit:
            return Outcome(OUT_OF_MEMORY)
        seconds = self.fixed + rows * self.per_row * (1 + ratio / 3)
        return Outcome(OK, rows / seconds, int(self.memory(point) * 1e6), steps)


SURFACES = {
    "half": Surface(0.006, 0.1, 260), "little": Surface(0.006, 0.1, 200), "much": Surface(0.006, 0.3, 330),
    "flat": Surface(0.006, 0.02, 270),
}  # fmt: skip


def space(batches=tuple(BATCHES)):
    found = Space()
    found.create_symbol("batch_size", batches)
    found.create_symbol("ckpt_ratio", RATIOS)
    return found
