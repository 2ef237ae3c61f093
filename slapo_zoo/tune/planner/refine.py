"""A layout made faster knob by knob: orders, ZeRO and the least recomputation that fits.

The wide search looks at two orders, six shares of recomputation and as little ZeRO as makes a layout fit.
Around the fastest that it finds every other value of these knobs is looked at here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slapo_zoo.pipeline.orders import ORDERS
from slapo_zoo.tune.planner.layout import Layout, divisors, orders_for
from slapo_zoo.tune.planner.timing import CLOSED

STARTS = 12  # of the wide search, each with another division of devices and rows
GRAIN = 32  # shares of recomputation that are looked at
MOST_FORWARDS = 2048  # of an order that is simulated action by action
GAIN = 1e-4  # of a step, for which it is worth going on

Forecast = Callable[[Layout], Any]
Fits = Callable[[Layout], bool]


def refine(
    forecast: Forecast, fits: Fits, found: Sequence[Any], blocks: int, orders: Sequence[str] | None
) -> list[Any]:
    """Search for faster layouts near the fastest that were found.

    Args:
        forecast: of a layout.
        fits: whether it fits.
        found: forecasts of the wide search.
        blocks: of the model.
        orders: of the pipeline that may be taken; None for all.
    """
    starts: dict[Any, Any] = {}
    for one in sorted(found, key=lambda f: f.step.seconds):
        at = one.layout
        starts.setdefault((at.tp, at.pp, at.dp, at.rows, at.sequence_parallel), one)
    chosen = list(starts.values())[:STARTS]
    climb = Climb(forecast, fits, blocks, orders or tuple(ORDERS))
    better = [climb.from_here(start) for start in chosen]
    return [one for one, start in zip(better, chosen, strict=True) if one is not start]


@dataclass(frozen=True)
class Climb:
    """Search from a layout to faster ones, one knob at a time.

    Args:
        forecast: of a layout.
        fits: whether it fits.
        blocks: of the model.
        orders: of the pipeline.
    """

    forecast: Forecast
    fits: Fits
    blocks: int
    orders: Sequence[str]

    def from_here(self, best: Any) -> Any:
        """The fastest that can be reached; `best` itself where nothing is faster."""
        while True:
            before = best.step.seconds
            for layout in (*self._sharded(best.layout), *self._ordered(best.layout)):
                best = self._least_recomputed(layout, best)
            if best.step.seconds > before * (1 - GAIN):
                return best

    def _sharded(self, layout: Layout) -> Iterator[Layout]:
        """The layout itself, and with every form of ZeRO."""
        yield replace(layout, dp_shard=1, zero_stage=3)
        for shards in divisors(layout.dp)[1:]:
            for stage in (1, 2, 3):
                yield replace(layout, dp_shard=shards, zero_stage=stage)

    def _ordered(self, layout: Layout) -> Iterator[Layout]:
        """The layout in every order that is not too long to simulate."""
        count = layout.micro_batches
        for order, virtual in orders_for(layout.pp, count, self.blocks, self.orders):
            if layout.pp > 1 and (order in CLOSED or count * layout.pp * virtual <= MOST_FORWARDS):
                yield replace(layout, pipeline_order=order, stages_per_rank=virtual)

    def _least_recomputed(self, layout: Layout, best: Any) -> Any:
        """The faster of `best` and the layout with as little recomputation as makes it fit."""
        steps = min(self.blocks, GRAIN)
        for policy in ("", "save_matmuls"):
            each = [
                replace(layout, checkpoint_ratio=i / steps, checkpoint_policy=policy * (i > 0))
                for i in range(steps + 1)
            ]
            least = bisect_left(each, True, key=self.fits)
            if least <= steps:
                best = min(best, self.forecast(each[least]), key=lambda f: f.step.seconds)
            if not least:
                break
        return best
