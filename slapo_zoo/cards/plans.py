"""Plans of a card: the layout that the planner found fastest for some devices, in `tuning.json` under "simulated"."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from slapo_zoo.errors import CardError
from slapo_zoo.pipeline.orders import ORDERS

SIMULATED = "simulated"
MOST = 64  # plans of a card


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned layout for one model on one kind of device, with its predicted times.

    Args:
        size: name of the checkpoint whose sizes the model has.
        model: its family and sizes, as `zoo.tuned.shape_name` has them.
        model_class: its head.
        parameters: of it.
        device: name of the planner's profile, a part of the device's own name.
        gpus: number of devices.
        rows: of a step, all copies together.
        seq_len: tokens of a row.
        knobs: arguments of `from_pretrained`.
        micro_batch_rows: rows of a micro-batch.
        step_s: simulated seconds of a step.
        tokens_per_s: of all devices.
        memory_gib: of the fullest device, without what libraries take.
        mean_error: of such times beside published runs on that device; None where none was compared.
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
        """Return the name of the devices: the key in the file."""
        return f"{self.gpus} x {self.device}"

    def row(self) -> tuple[str, str, str, str, str]:
        """Return the cells of a table: devices, knobs, seconds, tokens/s, error."""
        knobs = ", ".join(f"{name}={value!r}" for name, value in self.knobs.items())
        error = "unmeasured" if self.mean_error is None else f"{self.mean_error:.0%}"
        return self.name, f"`{knobs}`", f"{self.step_s:g}", f"{self.tokens_per_s:g}", error


COUNT = {"type": "integer", "minimum": 1, "maximum": 2**40}
NUMBER = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e18}
TEXT = {"type": "string", "pattern": r"^[A-Za-z0-9_. +=-]{1,400}$(?!\n)"}
POLICIES = ("save_matmuls", "sharded", "offload")


def _knobs() -> dict[str, Any]:
    """The schema of the knobs; closed: a card chooses nothing else, least of all what code is trusted."""
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
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": ["tp", "pp", "dp"],
    }


@cache
def _validator(whole: bool = True) -> Any:
    """Checks the plans of a file; not whole: the knobs of one."""
    from jsonschema import Draft202012Validator

    kinds: dict[Any, Any] = {str: TEXT, int: COUNT, float: NUMBER}
    properties = {f.name: kinds.get(f.type, _knobs()) for f in fields(Plan)}
    properties["mean_error"] = {"anyOf": [NUMBER, {"type": "null"}]}
    entry = {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}  # fmt: skip
    plans = {"type": "object", "maxProperties": MOST, "additionalProperties": entry}
    return Draft202012Validator(plans if whole else _knobs())


def plans_of(tuning: Mapping[str, Any]) -> list[Plan]:
    """The plans of a `tuning.json`; CardError for one that is not as they are."""
    found = tuning.get(SIMULATED, {})
    error = next(_validator().iter_errors(found), None)
    if error is not None:
        place = ".".join(map(str, (SIMULATED, *error.absolute_path)))
        hint = "`python3 ci/run.py cards --tune` writes them; take them out of the file"
        raise CardError("tuning.json", f"{place:.200}", f"{error.message:.300}", hint)
    return [Plan(**entry) for entry in found.values()]


def measured_knobs(tuned: Mapping[str, Any], model: str, ranks: int) -> dict[str, Any] | None:
    """The fastest point that `slapo-zoo tune --card` noted for a model on so many ranks of one device.

    Args:
        tuned: setting --> entry, of the device.
        model: as `zoo.tuned.model_name` has it.
        ranks: that there are.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for entry in tuned.values():
        known = _knobs()["properties"].keys() & entry.get("point", {}).keys()
        knobs = {"tp": 1, "pp": 1, "dp": 1} | {n: entry["point"][n] for n in sorted(known)}
        knobs = {n: value for n, value in knobs.items() if value is not None}
        is_known = not any(True for _ in _validator(False).iter_errors(knobs))
        if (
            is_known
            and entry.get("model") == model
            and knobs["tp"] * knobs["pp"] * knobs["dp"] == ranks
        ):
            found.append((float(entry.get("rows_per_s", 0.0)), knobs))
    return max(found, key=lambda one: one[0])[1] if found else None
