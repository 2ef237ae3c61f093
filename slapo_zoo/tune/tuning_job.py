"""The search of `slapo-zoo tune MODEL`: its configurations, their forecasts, and the processes that measure them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.models import resolve_class
from slapo_zoo.model.dp.dp_shard import check_dp_shard
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.tune.database import Scope
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import OK, Outcome, measure_in_worker
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import SIMULATED, Planner
from slapo_zoo.tune.planner.runtime_kind import precision_of
from slapo_zoo.tune.space import Point, Space
from slapo_zoo.tune.trial import OWN, PROBE_ROWS, Job
from slapo_zoo.zoo.argument_values import config_of
from slapo_zoo.zoo.options import KNOBS, MESH
from slapo_zoo.zoo.table import table_for
from slapo_zoo.zoo.tuned import machine_name, model_name


def points_for(ranks: int, symbols: Mapping[str, list[Any]]) -> list[Point]:
    """Return the valid configurations of a search, in which `micro_batches` divides `batch_size` and a
    `checkpoint_policy` comes with a `checkpoint_ratio`.

    Args:
        ranks: number of processes of a measurement; over 1, all configurations have this product of tp, pp, dp and cp.
        symbols: name --> candidates; names are arguments of `from_pretrained`, `batch_size`, `threads`, `kernels`.

    Raises:
        SlapoError: `symbols` has an unknown name or an illegal value, or no configuration is valid.
    """
    space = Space()
    for name, values in symbols.items():
        if name not in KNOBS and name not in OWN:
            hint = f"choose one of {', '.join((*KNOBS, *OWN))}"
            raise SlapoError("tune", f"--symbol {name}", "no such symbol", hint)
        _check_values(name, values)
        space.create_symbol(name, values)
    if ranks > 1:
        sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
        for name in ("tp", "pp", "dp"):
            if name not in symbols:
                space.create_symbol(name, sizes)
    points = space.all_points()
    found = [p for p in points if ranks in (1, math.prod(p.get(n) or 1 for n in MESH))]
    if not found:
        hint = f"give sizes with a product of {ranks}, or change --gpus"
        raise SlapoError("tune", f"--gpus {ranks}", "no tp * pp * dp * cp equals this number", hint)
    found = [point for point in found if _is_valid(point)]
    if not found:
        hint = "choose micro_batches that divide batch_size, and a checkpoint_ratio for a checkpoint_policy"
        raise SlapoError("tune", "--symbol", "found no valid configuration", hint)
    return found


def _is_valid(point: Point) -> bool:
    rows, count = point.get("batch_size", 8), point.get("micro_batches") or 1
    needless = point.get("checkpoint_policy") and not point.get("checkpoint_ratio")
    return rows % count == 0 and not needless


def _check_values(name: str, values: list[Any]) -> None:
    knob = KNOBS.get(name, KNOBS["tp"])  # symbols that are no knobs are counts
    if bad := [value for value in values if not knob.fits(value)]:
        problem = f"found {bad[0]!r}, expected {knob.expected}"
        raise SlapoError("tune", f"--symbol {name}", problem, "correct or remove this value")


UNSAID = ("loss_type",)  # config fields that transformers reads but no config class defines


def check_changes(model: str, changes: Mapping[str, Any]) -> None:
    """Raise SlapoError for the first key of `changes` (field --> value) that the model's config has no field for."""
    config, _ = config_of(model)
    for name in changes:
        if not hasattr(config, name) and name not in UNSAID:
            near = ", ".join(nearest(name, config.to_dict()) or ["none"])
            hint = f"use a field of the config; nearest: {near}"
            problem = f"{type(config).__name__} has no such field"
            raise SlapoError("tune", f"--change {name}", problem, hint)


def default_symbols(model: str) -> dict[str, list[Any]]:
    """Return {option: values} searched by default: batch sizes, and those of checkpoint_ratio, attention and kernels
    that the family's table calls tunable. `model` is a family, a folder or a Hub id.
    """
    config, head = config_of(model)
    tunable = table_for(config.model_type).tries(resolve_class(config, head))
    names = [name for name in ("checkpoint_ratio", "attention", "kernels") if name in tunable]
    found = {n: [v for v in tunable[n] if v not in ("flash", "flex", "xformers")] for n in names}
    return {"batch_size": [1, 2, 4, 8, 16, 32]} | found


def forecasts(job: Job, grid: Grid) -> tuple[list[float], dict[int, str]]:
    """Forecast every configuration of the grid; return a list and a dict, both by its number (index in `grid.points`):
    rows per second (about 0 if it is impossible), and why it is refused, if it is impossible or takes too much memory.
    """
    hardware = HARDWARE["cpu" if job.device == "cpu" else "a100"]
    hardware = replace(hardware, memory=job.memory or hardware.memory)
    config, head = job.config()
    planner_for = cache(lambda name: Planner(config, hardware, job.seq_len, name, auto_class=head))
    expected, refused = [], {}
    for i, point in enumerate(grid.points):
        one, rows = replace(job, point=point), int(point.get("batch_size", 8))
        try:
            options, mesh = one.options, one.mesh
            check_dp_shard(mesh, options.dp_shard, options.zero_stage)
            places = StageMap.make(options.pipeline_order, mesh.pp, options.stages_per_rank)
            count = options.micro_batches or places.usual_micro_batches(rows)
            planner = planner_for(options.precision or precision_of(str(options.dtype)))
            layout = Layout.of(options, mesh, rows // count, count)
            is_ring = layout.cp > 1 and layout.cp_attention not in SIMULATED  # it takes less memory
            way = SIMULATED[0] if is_ring else layout.cp_attention
            found = planner.forecast(replace(layout, cp_attention=way))
        except SlapoError as error:
            expected.append(1e-9)
            refused[i] = error.problem
            continue
        expected.append(rows * mesh.dp / found.step.seconds)
        if not is_ring and found.memory > hardware.memory - hardware.reserved:
            refused[i] = planner.why(found)
    return expected, refused


class Workers:
    """Callable ({option: value}, steps) --> Outcome that measures a configuration in fresh processes; "wrong" if its
    loss differs, beyond rounding, from that of `from_pretrained(kernels="reference")` on one rank.

    Args:
        job: model, dtype, ... of all measurements; each one sets its own configuration, steps and expected loss.
        timeout_s: seconds after which a measurement is stopped.
    """

    def __init__(self, job: Job, timeout_s: float):
        self.job, self.timeout_s = job, timeout_s
        self.probe: float | None = None

    def __call__(self, point: Point, steps: int) -> Outcome:
        """Measure the configuration `point` over `steps` training steps in a fresh process."""
        if self.probe is None:
            self.probe = self._probe()
        return self._measure(point, steps, self.probe)

    def _probe(self) -> float:
        outcome = self._measure({"batch_size": PROBE_ROWS, "kernels": "reference"}, 1, None)
        if outcome.kind != OK:
            why = f"{outcome.kind}: {outcome.message}"
            problem = f"the run whose loss all others must match, on one rank with reference kernels, failed: {why}"
            hint = "remove this cause, e.g. by another model, dtype or device; `slapo-zoo bench` times one configuration"
            raise SlapoError("tune", self.job.model, problem, hint)
        return float(outcome.message.rpartition(" ")[2])

    def _measure(self, point: Point, steps: int, probe: float | None) -> Outcome:
        job = replace(self.job, point=point, steps=steps, probe=probe)
        return measure_in_worker(vars(job), self.timeout_s)


def scope_of(job: Job) -> Scope:
    """Return the Scope of `job` (device, model, software versions, tokens per row, dtype, memory limit): the database
    reuses outcomes whose Scope is equal.
    """
    dtype = str(job.computes).removeprefix("torch.")
    more = {"seq_len": job.seq_len, "dtype": dtype, "memory": job.memory}
    name = model_name(job.config()[0])
    return Scope(machine_name(job.device or "cpu"), name, "zoo", software(), more)
