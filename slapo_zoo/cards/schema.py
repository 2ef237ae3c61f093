"""The JSON Schema of `schedule.json`, and the primitives that a card may name.

The set is closed here, and not by registration: what a third party registers in a process is not
what a stranger's file may call.
"""

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

# primitive --> the arguments that are left out, because they may be live objects
PUBLISHABLE: dict[str, tuple[str, ...]] = {
    "checkpoint": ("subgraph",),
    "core_attention": (),
    "cut_pipeline_stage": (),
    "decompose": (),
    "expert_parallel": (),
    "fork_rng": (),
    "overlap": (),
    "replace": ("subgraph", "concrete_args", "target_ops"),
    "shard": (),
    "shard_argument": (),
    "shard_attribute": (),
    "sum_gradient": (),
    "sync": (),
    "sync_batch_norm": (),
    "sync_rms_norm": (),
    "unfused": (),
    "vocab_bias": (),
}


@cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema of schedule.json, read from the package."""
    file = resources.files("slapo_zoo.cards").joinpath("schedule.schema.json")
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def validator() -> Any:
    """Return the validator of schedule.json; 1.0 is no integer for it."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def all_of(validator: Any, rules: Any, instance: Any, rule: Any) -> Iterator[Any]:
        """Check a step against the rule of its own primitive alone: the other rules never apply, and are slow."""
        for index, each in enumerate(rules):
            if isinstance(instance, list) and instance[1:2] != [_primitive_of(each)]:
                continue
            yield from validator.descend(instance, each, schema_path=index)

    # JSON Schema counts 1.0 as an integer; a directive does not.
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    return extend(Draft202012Validator, {"allOf": all_of}, type_checker=checker)(schema())


def _primitive_of(rule: Any) -> str:
    """Whose arguments a rule of a step is about."""
    return rule["if"]["prefixItems"][1]["const"]
