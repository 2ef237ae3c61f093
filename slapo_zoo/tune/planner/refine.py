"""Refine the fastest layouts one option at a time: pipeline order, ZeRO, and the least recomputation that fits.

The wide search tries two orders, up to seven ways of recomputation and the lowest ZeRO stage that fits; here every
other value of these options is tried around the fastest layouts of the wide search.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slapo_zoo.pipeline.orders import ORDERS
from slapo_zoo.tune.planner.layout import CLOSED, Layout, divisors, orders_for

STARTS = 12  # layouts of the wide search to start from, each with another mesh and micro-batch
GRAIN = 32  # number of shares of recomputation that are tried
MOST_FORWARDS = 2048  # most forwards in an order that is simulated action by action
GAIN = 1e-4  # share of a step that a change must save

Forecast = Callable[[Layout], Any]  # a Forecasted
Fits = Callable[[Layout], bool]


def refine(
    forecast: Forecast, fits: Fits, found: Sequence[Any], blocks: int,
    orders: Sequence[str] | None,
) -> list[Any]:  # fmt: skip
    """Return forecasts of faster layouts, reached from the fastest ones in `found` by changing one option at a time.

    Args:
        forecast: function from a layout to its forecast.
        fits: function from a layout to whether it fits into memory.
        found: forecasts that a wide search has made; the refinement starts from the fastest.
        blocks: number of blocks of the model.
        orders: pipeline orders that may be used; None for all.
    """
    starts: dict[Any, Any] = {}
    for one in sorted(found, key=lambda f: f.step.seconds):
        at = one.layout
        starts.setdefault((at.tp, at.pp, at.dp, at.cp, at.rows, at.sequence_parallel), one)
    chosen = list(starts.values())[:STARTS]
    climb = Climb(forecast, fits, blocks, orders or tuple(ORDERS))
    better = [climb.from_here(start) for start in chosen]
    return [one for one, start in zip(better, chosen, strict=True) if one is not start]


@dataclass(frozen=True)
class Climb:
    """Hill climbing from a layout to faster ones, changing one argument of `from_pretrained` at a time.

    `forecast` maps a layout to its forecast, `fits` a layout to True if it fits into memory. `blocks` is the number of
    blocks of the model, `orders` are the pipeline orders to try.
    """

    forecast: Forecast
    fits: Fits
    blocks: int
    orders: Sequence[str]

    def from_here(self, best: Any) -> Any:
        """Change one option of `best`'s layout at a time (ZeRO, pipeline order, recomputation), over and over while the
        step gets faster; return the forecast of the fastest layout.
        """
        while True:
            before = best.step.seconds
            for layout in (*self._sharded(best.layout), *self._ordered(best.layout)):
                best = self._least_recomputed(layout, best)
            if best.step.seconds > before * (1 - GAIN):
                return best

    def _sharded(self, layout: Layout) -> Iterator[Layout]:
        """Yield `layout` without ZeRO, then with ZeRO-1, 2 and 3 over each divisor of dp * cp that is larger than 1."""
        yield replace(layout, dp_shard=1, zero_stage=3)
        for shards in divisors(layout.replicas)[1:]:
            for stage in (1, 2, 3):
                yield replace(layout, dp_shard=shards, zero_stage=stage)

    def _ordered(self, layout: Layout) -> Iterator[Layout]:
        """Yield variants of `layout`, one per pipeline order, except those whose simulation would take too long."""
        count = layout.micro_batches
        for order, virtual in orders_for(layout.pp, count, self.blocks, self.orders):
            if layout.pp > 1 and (order in CLOSED or count * layout.pp * virtual <= MOST_FORWARDS):
                yield replace(layout, pipeline_order=order, stages_per_rank=virtual)

    def _least_recomputed(self, layout: Layout, best: Any) -> Any:
        """Return the faster of `best` and the forecasts of `layout` with the lowest checkpoint_ratio that fits into
        memory, under checkpoint_policy "" and, if cp is 1, "save_matmuls".
        """
        steps = min(self.blocks, GRAIN)
        for policy in ("", "save_matmuls")[: 1 + (layout.cp == 1)]:
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
