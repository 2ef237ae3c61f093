"""Plans in a card (a published schedule): for a model and a device the `from_pretrained` arguments, such as mesh sizes,
that were the fastest in a simulation. They are stored under "simulated" in the card's `tuning.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from slapo_zoo.errors import CardError
from slapo_zoo.pipeline.orders import ORDERS

SIMULATED = "simulated"
MOST = 64  # largest number of plans in a card


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arguments of `from_pretrained` (mesh sizes, ...) planned for a model on one kind of device, with simulated times.

    Args:
        size: name of the checkpoint whose sizes the model has.
        model: family and sizes of the model, e.g. "gpt2 hidden_size=1600 ..." (`zoo.tuned.shape_name`).
        model_class: name of the model's class, with its head.
        parameters: number of parameters of the model.
        device: name of the planner's hardware profile, e.g. "h100", which is part of the device's own name.
        gpus: number of devices.
        rows: rows of the global batch of a step, over all data-parallel replicas.
        seq_len: tokens per row.
        knobs: arguments of `from_pretrained`: mesh sizes, zero_stage, checkpoint_ratio, precision, ...
        micro_batch_rows: rows per micro-batch.
        step_s: simulated seconds per step.
        tokens_per_s: simulated tokens per second of all devices together.
        memory_gib: simulated GiB on the fullest device, without the memory that libraries take.
        mean_error: mean relative error of simulated against published times on this device; None if unknown.
    """

    size: str
    model: str
    model_class: str
    parameters: int
    device: str
    gpus: int
    rows: int
    seq_len: int
    knobs: Mapping[str, Any]
    micro_batch_rows: int
    step_s: float
    tokens_per_s: float
    memory_gib: float
    mean_error: float | None

    @property
    def name(self) -> str:
        """Return number and kind of the devices, e.g. "8 x h100": the plan's key in tuning.json."""
        return f"{self.gpus} x {self.device}"

    def row(self) -> tuple[str, str, str, str, str]:
        """Return the plan's row in the README's table: devices, arguments, simulated seconds per step, tokens/s, and
        the mean relative error of simulated times, "unmeasured" if no time was measured.
        """
        knobs = ", ".join(f"{name}={value!r}" for name, value in self.knobs.items())
        error = "unmeasured" if self.mean_error is None else f"{self.mean_error:.0%}"
        return self.name, f"`{knobs}`", f"{self.step_s:g}", f"{self.tokens_per_s:g}", error


COUNT = {"type": "integer", "minimum": 1, "maximum": 2**40}
NUMBER = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e18}
TEXT = {"type": "string", "pattern": r"^[A-Za-z0-9_. +=-]{1,400}$(?!\n)"}
POLICIES = ("save_matmuls", "sharded", "offload")


def _knobs_schema() -> dict[str, Any]:
    """Return the JSON Schema of `Plan.knobs`: the loader arguments (mesh sizes, zero_stage, ...) that a plan sets."""
    counts = ("tp", "pp", "dp", "dp_shard", "micro_batches", "stages_per_rank")
    each = {"type": "array", "maxItems": 1024, "items": {"enum": ["keep", "recompute", *POLICIES]}}
    properties = dict.fromkeys(counts, COUNT) | {
        "zero_stage": {"enum": [1, 2, 3]}, "sequence_parallel": {"type": "boolean"},
        "pipeline_order": {"enum": list(ORDERS)},
        "checkpoint_ratio": {"type": "number", "minimum": 0, "maximum": 1},
        "checkpoint_policy": {"anyOf": [{"enum": ["", *POLICIES]}, each]},
        "precision": {"enum": ["fp32", "bf16", "bf16-pure", "fp16", "fp16-pure"]},
        "kernels": {"enum": ["auto", "reference"]},
    }  # fmt: skip
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": ["tp", "pp", "dp"]}  # fmt: skip


@cache
def _validator(whole: bool = True) -> Any:
    """Return a JSON Schema validator for the plans in a tuning.json; if not `whole`, for the loader arguments of a plan."""
    from jsonschema import Draft202012Validator

    kinds: dict[Any, Any] = {str: TEXT, int: COUNT, float: NUMBER}
    properties = {f.name: kinds.get(f.type, _knobs_schema()) for f in fields(Plan)}
    properties["mean_error"] = {"anyOf": [NUMBER, {"type": "null"}]}
    entry = {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}  # fmt: skip
    plans = {"type": "object", "maxProperties": MOST, "additionalProperties": entry}
    return Draft202012Validator(plans if whole else _knobs_schema())


def plans_of(tuning: Mapping[str, Any]) -> list[Plan]:
    """Return the plans (loader arguments, simulated times) of a parsed `tuning.json`; CardError for a malformed plan."""
    found = tuning.get(SIMULATED, {})
    error = next(_validator().iter_errors(found), None)
    if error is not None:
        place = ".".join(map(str, (SIMULATED, *error.absolute_path)))
        hint = "take this entry out of the card's tuning.json, or load with a card that is valid"
        raise CardError("tuning.json", f"{place:.200}", f"{error.message:.300}", hint)
    return [Plan(**entry) for entry in found.values()]


def measured_knobs(tuned: Mapping[str, Any], model: str, ranks: int) -> dict[str, Any] | None:
    """Return the `from_pretrained` arguments of the fastest setting (rows/s, any dtype and row length); None: no match.

    Args:
        tuned: results of `slapo-zoo tune --card` on one device: setting (model, dtype, ...) --> measurements.
        model: family and config digest, "gpt2 0a1b2c3d4e5f" (`zoo.tuned.model_name`).
        ranks: number of ranks, which tp * pp * dp of a match must equal; a match has cp=1.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for entry in tuned.values():
        point = entry.get("point", {})
        known = _knobs_schema()["properties"].keys() & point.keys()
        knobs = {"tp": 1, "pp": 1, "dp": 1} | {n: point[n] for n in sorted(known)}
        knobs = {n: value for n, value in knobs.items() if value is not None}
        is_known = not any(True for _ in _validator(False).iter_errors(knobs))
        fits = is_known and entry.get("model") == model and point.get("cp") in (None, 1)
        if fits and knobs["tp"] * knobs["pp"] * knobs["dp"] == ranks:
            found.append((float(entry.get("rows_per_s", 0.0)), knobs))
    return max(found, key=lambda one: one[0])[1] if found else None
