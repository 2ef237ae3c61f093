"""Fastest layout on a cluster as an entry of a card's `tuning.json`: simulated, with the planner's error."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slapo_zoo.tune.planner.hardware import GIB
from slapo_zoo.tune.planner.layout_report import worth
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.search_result import require_feasible
from slapo_zoo.zoo.cards.plans import SIMULATED, Plan, plans_of
from slapo_zoo.zoo.tuned import shape_name

ORDERS = ("1f1b", "interleaved_1f1b")
KNOBS = ("tp", "pp", "dp", "pipeline_order", "stages_per_rank", "checkpoint_ratio", "checkpoint_policy",
         "dp_shard", "zero_stage", "sequence_parallel")  # fmt: skip


def plan_for(
    planner: Planner, device: str, gpus: int, rows: int, size: str, precision: str, divided: bool = False
) -> Plan:  # fmt: skip
    """Simulate all layouts of a cluster, and return the fastest one as a plan for a card.

    Args:
        planner: planner of the model on this kind of device.
        device: name of the device's hardware profile.
        gpus: number of devices.
        rows: rows of a step over all replicas.
        size: name of the checkpoint whose sizes the model has.
        precision: the planner's precision.
        divided: whether layouts with sequence parallelism are tried too.

    Raises:
        MeshError: no layout fits.
    """
    found = planner.search(gpus, rows, ORDERS, divided, cut=False)  # a plan of a card names no cp
    best = require_feasible(found, f"{gpus} x {device}")
    knobs = {name: list(value) if isinstance(value, tuple) else value
             for name, value in best.layout.knobs().items() if name in KNOBS}  # fmt: skip
    used = worth(planner, best)
    return Plan(
        size=size, model=shape_name(planner.family.config), model_class=planner.family.cls.__name__,
        parameters=found.parameters, device=device, gpus=gpus, rows=rows, seq_len=planner.seq_len,
        knobs=knobs | {"micro_batches": best.layout.micro_batches, "precision": precision, "kernels": "auto"}, micro_batch_rows=best.layout.rows,
        step_s=_short(best.step.seconds), tokens_per_s=_short(used.tokens_per_s),
        memory_gib=_short(best.memory / GIB), mean_error=used.error,
    )  # fmt: skip


def with_plans(tuning: Mapping[str, Any], plans: list[Plan]) -> dict[str, Any]:
    """Return the content of a tuning.json with `plans` added; they replace plans for the same devices.

    Other entries, such as measurements, are kept.
    """
    old = {plan.name: plan for plan in plans_of(tuning)}
    merged = old | {plan.name: plan for plan in plans}
    rest = {name: value for name, value in tuning.items() if name != SIMULATED}
    found = {name: asdict(plan) for name, plan in sorted(merged.items())}
    return {SIMULATED: found, **rest} if found else rest


def _short(value: float) -> float:
    """Round to three significant digits, which are equal on all machines."""
    return float(f"{value:.3g}")
