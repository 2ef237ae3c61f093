"""The search of `slapo-zoo tune MODEL`: its space, the planner's forecasts, and measuring workers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.tune.database import Scope
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import OK, Outcome
from slapo_zoo.tune.planner.hardware import HARDWARE, Hardware
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.runtime_kind import precision_of
from slapo_zoo.tune.space import Point, Space
from slapo_zoo.tune.trial import OWN, Job
from slapo_zoo.tune.worker import measure_in_worker
from slapo_zoo.zoo.argument_values import config_of, to_dtype
from slapo_zoo.zoo.options import KNOBS
from slapo_zoo.zoo.table import table_for
from slapo_zoo.zoo.tuned import machine_name, model_name


@dataclass(frozen=True)
class Setting:
    """Settings that all measurements of a search share.

    Args:
        model: a family, a folder or a Hub id.
        ranks: processes of a measurement: tp * pp * dp.
        seq_len: tokens of a row.
        dtype: dtype of the parameters.
        device: "cpu" or "cuda".
        memory: bytes that a rank may use; 0 for no limit.
        timeout_s: seconds after which a measurement is stopped.
        changes: fields of the config to override.
    """

    model: str
    ranks: int = 1
    seq_len: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    memory: int = 0
    timeout_s: float = 600.0
    changes: Mapping[str, Any] | None = None


def space_for(setting: Setting, symbols: Mapping[str, list[Any]]) -> Space:
    """Return the tuning space: the given symbols, and tp, pp and dp for all ranks.

    Args:
        setting: settings of the search.
        symbols: name --> candidates; knobs of `from_pretrained`, `batch_size`, `threads`, `kernels`.

    Raises:
        SlapoError: a symbol's name is not that of a knob.
    """
    space = Space()
    for name, values in symbols.items():
        if name not in KNOBS and name not in OWN:
            hint = f"choose one of {', '.join((*KNOBS, *OWN))}"
            raise SlapoError("tune", f"--symbol {name}", "no such knob", hint)
        _check_values(name, values)
        space.create_symbol(name, values)
    if setting.ranks > 1:
        sizes = [n for n in range(1, setting.ranks + 1) if setting.ranks % n == 0]
        for name in ("tp", "pp"):
            if name not in symbols:
                space.create_symbol(name, sizes)
        space.create_symbol("dp", lambda tp, pp: [n for n in sizes if tp * pp * n == setting.ranks])
    return space


def _check_values(name: str, values: list[Any]) -> None:
    knob = KNOBS.get(name, KNOBS["tp"])  # our own symbols are counts, too
    if bad := [value for value in values if not knob.fits(value)]:
        problem = f"found {bad[0]!r}, expected {knob.expected}"
        raise SlapoError("tune", f"--symbol {name}", problem, "correct the values of --symbol")


UNSAID = ("loss_type",)  # what transformers reads of a config where it is set, and no class names


def check_changes(model: str, changes: Mapping[str, Any]) -> None:
    """Raise SlapoError for the first key of `changes` (field --> value) that the model's config has no field for."""
    config, _ = config_of(model)
    for name in changes:
        if not hasattr(config, name) and name not in UNSAID:
            near = ", ".join(nearest(name, config.to_dict()))
            problem = f"{type(config).__name__} has no such field"
            raise SlapoError("tune", f"--change {name}", problem, f"nearest: {near}")


def points_for(setting: Setting, symbols: Mapping[str, list[Any]]) -> list[Point]:
    """Return the valid configurations: rows are a multiple of micro-batches, and a recompute policy comes with a ratio."""

    def legal(point: Point) -> bool:
        rows, count = point.get("batch_size", 8), point.get("micro_batches") or 1
        needless = point.get("checkpoint_policy") and not point.get("checkpoint_ratio")
        return rows % count == 0 and not needless

    found = [point for point in space_for(setting, symbols).all_points() if legal(point)]
    if not found:
        raise SlapoError(
            "tune",
            "space",
            "no configuration is valid",
            "choose micro_batches that divide batch_size",
        )
    return found


def default_symbols(model: str) -> dict[str, list[Any]]:
    """Return {symbol: values} searched by default: batch sizes, and options that the family's table marks tunable."""
    config, _ = config_of(model)
    tunable = table_for(config.model_type).tunable
    found: dict[str, list[Any]] = {"batch_size": [1, 2, 4, 8, 16, 32]}
    for name in ("checkpoint_ratio", "attention", "kernels"):
        if name in tunable:
            found[name] = [v for v in tunable[name] if v not in ("flash", "flex", "xformers")]
    return found


class Forecaster:
    """Planner of a tuning search: forecasts throughput and memory of every configuration."""

    def __init__(self, setting: Setting, hardware: Hardware | None = None):
        device = hardware or HARDWARE["cpu" if setting.device == "cpu" else "a100"]
        self.hardware = replace(device, memory=setting.memory) if setting.memory else device
        config, head = config_of(setting.model)
        for name, value in (setting.changes or {}).items():
            setattr(config, name, value)
        self.planner = Planner(
            config,
            self.hardware,
            setting.seq_len,
            precision_of(str(to_dtype(setting.dtype))),
            auto_class=head,
        )

    def judge(self, grid: Grid) -> tuple[list[float], dict[int, str]]:
        """Return (expected rows per second of every configuration, {number of a configuration: why it cannot run})."""
        expected, refused = [], {}
        for i, point in enumerate(grid.points):
            rows, count = int(point.get("batch_size", 8)), int(point.get("micro_batches") or 1)
            known = {n: point[n] for n in ("tp", "pp", "dp", "checkpoint_ratio", "checkpoint_policy",
                                           "sequence_parallel") if point.get(n) is not None}  # fmt: skip
            layout = Layout(**known, rows=rows // count, micro_batches=count)
            try:
                found = self.planner.forecast(layout)
            except SlapoError as error:
                expected.append(1e-9)
                refused[i] = error.problem
                continue
            expected.append(rows * layout.dp / found.step.seconds)
            if found.memory > self.hardware.memory - self.hardware.reserved:
                refused[i] = self.planner.why(found)
        return expected, refused


class Workers:
    """Callable that measures configurations in fresh processes, and checks their loss.

    The loss must agree with that of one rank with `kernels="reference"`, which is measured first.
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        self.probe: float | None = None

    def __call__(self, point: Point, steps: int) -> Outcome:
        """Measure one configuration over `steps` steps in a fresh process."""
        if self.probe is None:
            self.probe = self._probe()
        return measure_in_worker(self._job(point, steps, self.probe), self.setting.timeout_s)

    def _probe(self) -> float:
        plain = {"batch_size": 2, "kernels": "reference"}
        outcome = measure_in_worker(self._job(plain, 1, None), self.setting.timeout_s)
        if outcome.kind != OK:
            problem = f"the plain schedule cannot be measured: {outcome.kind}: {outcome.message}"
            raise SlapoError(
                "tune",
                self.setting.model,
                problem,
                "run `slapo-zoo bench` first, until the model trains without tuning",
            )
        return float(outcome.message.rpartition(" ")[2])

    def _job(self, point: Point, steps: int, probe: float | None) -> dict[str, Any]:
        s = self.setting
        job = Job(s.model, point, steps, s.seq_len, s.changes, s.dtype, s.device, s.memory, probe,
                  int(point.get("threads") or 1))  # fmt: skip
        return asdict(job)


def scope_of(setting: Setting) -> Scope:
    """Return the conditions under which outcomes of this search may be reused from the database."""
    config, _ = config_of(setting.model)
    for name, value in (setting.changes or {}).items():
        setattr(config, name, value)
    more = {"seq_len": setting.seq_len, "dtype": setting.dtype, "memory": setting.memory}
    return Scope(machine_name(setting.device), model_name(config), "zoo", software(), more)
