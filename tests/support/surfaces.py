"""Throughput surfaces of 13 batch sizes and 7 checkpoint ratios with a region that does not fit."""

from slapo_zoo.tune.outcome import OK, OUT_OF_MEMORY, Outcome
from slapo_zoo.tune.space import Space

BATCHES = list(range(96, 193, 8))
RATIOS = [0.25, 0.34, 0.5, 0.67, 0.84, 0.92, 1.0]


class Surface:
    """Surface of a step that takes `fixed` s plus `per_row` s a row, a third more with recomputation.

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


class Measured:
    """The 91 configurations of the original Slapo's tuner in samples/s; 0 ran out of memory, without a measured peak.

    Source: awslabs/slapo, benchmark/plot/autotune.py (Apache-2.0).
    """

    ROWS = (
        (123.7, 124.3, 126.9, 0.0, 0.0, 0.0, 0.0), (121.1, 123.0, 125.9, 0.0, 0.0, 0.0, 0.0),
        (120.7, 122.8, 124.0, 0.0, 0.0, 0.0, 0.0), (118.2, 121.0, 122.6, 127.6, 0.0, 0.0, 0.0),
        (121.3, 122.6, 124.0, 129.3, 0.0, 0.0, 0.0), (118.4, 120.4, 122.7, 127.9, 0.0, 0.0, 0.0),
        (118.4, 120.4, 120.9, 126.0, 130.9, 0.0, 0.0), (115.8, 118.2, 120.4, 123.1, 128.8, 0.0, 0.0),
        (115.4, 116.7, 118.1, 121.4, 127.2, 0.0, 0.0), (113.7, 115.0, 116.0, 120.2, 125.4, 128.4, 0.0),
        (110.1, 111.6, 114.1, 117.1, 121.5, 123.8, 127.1), (108.2, 108.3, 109.5, 113.1, 116.3, 118.4, 122.4),
        (101.5, 106.5, 106.9, 107.8, 112.0, 114.9, 115.4),
    )  # fmt: skip

    def __call__(self, point, steps=0):
        row = self.ROWS[BATCHES[::-1].index(point["batch_size"])]
        rate = row[RATIOS[::-1].index(point["ckpt_ratio"])]
        return Outcome(OK, rate, 0, steps) if rate else Outcome(OUT_OF_MEMORY)


class Silent(Surface):
    """Surface with jumps that reports no memory of a configuration.

    Batches that are no multiple of `step` cost `loss` more, as products in tiles do.
    """

    def __init__(self, per_row, fixed, limit, step=8, loss=0.0, kept=1.8):
        super().__init__(per_row, fixed, limit)
        self.step, self.loss, self.kept = step, loss, kept

    def memory(self, point):
        return point["batch_size"] * (1 + self.kept * (1 - point["ckpt_ratio"]))

    def __call__(self, point, steps=0):
        found = super().__call__(point, steps)
        if found.kind != OK:
            return found
        slower = 1 + self.loss * (point["batch_size"] % self.step > 0)
        return Outcome(OK, found.throughput / slower, 0, steps)


CLIFFS = {
    "the original's": Measured(), "half": Silent(0.006, 0.1, 260), "little": Silent(0.006, 0.1, 200),
    "much": Silent(0.006, 0.3, 330), "tiles": Silent(0.006, 0.1, 260, 16, 0.02),
    "cheap to keep": Silent(0.006, 0.2, 220, kept=0.8),
}  # fmt: skip
