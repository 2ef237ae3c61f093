"""Make `slapo_zoo/zoo/cards/schedule.schema.json` from the fields of the primitives that a card may name."""

import dataclasses
import types
from typing import Any, get_args, get_origin, get_type_hints

import slapo_zoo.language.primitives  # noqa: F401 - registers them
from slapo_zoo.language.directive import PRIMITIVES
from slapo_zoo.language.schedule import FORMAT
from slapo_zoo.zoo.cards.schema import PUBLISHABLE
from slapo_zoo.zoo.expressions import MAX_TEXT

MAX_STEPS = 10_000
# least value of integer fields, where not every integer makes sense
LEAST = {("shard", "axis"): 0, ("shard", "unit"): 1, ("shard", "together"): 1,
         ("shard_attribute", "unit"): 1, ("shard_attribute", "together"): 1,
         ("shard_argument", "size"): 1, ("shard_argument", "axis"): 0,
         ("core_attention", "num_heads"): 1, ("core_attention", "together"): 1,
         ("cut_pipeline_stage", "call"): 0}  # fmt: skip
END = r"$(?!\n)"  # `$` alone also matches before a final line break
# A path has names and globs; few globs, because each multiplies the work of a match.
PATH: dict[str, Any] = {
    "type": "string",
    "pattern": r"^[A-Za-z0-9_.*]{0,256}(:[A-Za-z][A-Za-z0-9]{0,80})?" + END,
    "not": {"pattern": r"__|^([^*]*\*){9}|\*\*[^*]*\*\*[^*]*\*\*"},
}
NAME: dict[str, Any] = {
    "type": "string",
    "pattern": r"^[A-Za-z0-9_.+>-]{0,120}" + END,
    "not": {"pattern": "__"},
}
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"=": {"type": "string", "maxLength": MAX_TEXT}},
    "required": ["="],
    "additionalProperties": False,
}
_VALUE: dict[str, Any] = {
    "type": ["integer", "number", "boolean", "null", "string", "object", "array"],
    "if": {"type": "string"},
    "then": NAME,
    "maxItems": 64,
    "items": {"$ref": "#/$defs/value"},
    "properties": {"=": {"type": "string", "maxLength": MAX_TEXT}},
    "required": ["="],
    "additionalProperties": False,
}


def build_schema() -> dict[str, Any]:
    """Return the JSON Schema of schedule.json, as committed in slapo_zoo/zoo/cards."""
    text = {"type": "string", "maxLength": MAX_TEXT}
    digest = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}" + END}
    name = {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_-]{0,80}" + END}
    model = _object({"model_type": name, "class": name})
    numbers = {"type": "object", "maxProperties": 64, "additionalProperties": text,
               "propertyNames": {"pattern": "^[a-z][a-z0-9_]{0,40}" + END}}  # fmt: skip
    steps = {"type": "array", "maxItems": MAX_STEPS, "items": {"$ref": "#/$defs/step"}}
    properties = {
        "format": {"const": FORMAT},
        "model": model,
        "structure": {"anyOf": [digest, {"type": "null"}]},
        "numbers": numbers,
        "constraints": {"type": "array", "maxItems": 64, "items": text},
        "steps": steps,
    }
    step = {
        "type": "array",
        "prefixItems": [PATH, {"enum": list(PUBLISHABLE)}, {"type": "object"}],
        "items": False,
        "minItems": 3,
        "allOf": [_arguments_of(name, left_out) for name, left_out in PUBLISHABLE.items()],
    }
    definitions = {"value": _VALUE, "step": step}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        **_object(properties),
        "$defs": definitions,
    }


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties) if required is None else required,
        "additionalProperties": False,
    }


def _arguments_of(name: str, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON Schema rule: a step that names this primitive has its fields, except `left_out`, as arguments."""
    cls: Any = PRIMITIVES[name]
    fields = [f for f in dataclasses.fields(cls) if f.name not in left_out]
    needed = [f.name for f in fields if f.default is dataclasses.MISSING]
    kinds = get_type_hints(cls)
    arguments = _object({f.name: _of_kind(kinds[f.name], (name, f.name)) for f in fields}, needed)
    return {
        "if": {"prefixItems": [True, {"const": name}]},
        "then": {"prefixItems": [True, True, arguments]},
    }


def _of_kind(kind: Any, field: tuple[str, str]) -> dict[str, Any]:
    """Return the JSON Schema of an argument; `kind` is the annotation of its field, `field` (primitive, field name)."""
    if isinstance(kind, types.UnionType):
        options = [_of_kind(one, field) for one in get_args(kind) if one is not types.NoneType]
        return {"anyOf": [*options, {"type": "null"}]}
    if kind is int:
        limits = {"minimum": LEAST.get(field, -(2**31)), "maximum": 2**31}
        return {"anyOf": [{"type": "integer", **limits}, SUM]}
    if get_origin(kind) is tuple and get_args(kind)[0] is int:
        return {"type": "array", "maxItems": 64, "items": _of_kind(int, field)}
    return {bool: {"type": "boolean"}, str: NAME}.get(kind, {"$ref": "#/$defs/value"})
