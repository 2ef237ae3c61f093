"""JSON Schema of a card's `schedule.json`, and the primitives (kinds of changes of a module) that cards may use.

The primitives are listed here by name, so that a downloaded card cannot call one that a third party
has registered in the process.
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
    file = resources.files("slapo_zoo.zoo.cards").joinpath("schedule.schema.json")
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def validator() -> Any:
    """Return the JSON Schema validator of schedule.json, which does not take 1.0 for an integer."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def all_of(validator: Any, rules: Any, instance: Any, rule: Any) -> Iterator[Any]:
        """Yield the errors of `instance`, e.g. a directive in schedule.json. jsonschema calls this for each "allOf",
        whose list of schemas is `rules`. For a directive, only the schema of its primitive is tried, to save time.
        """
        for index, each in enumerate(rules):
            if not isinstance(instance, list) or instance[1:2] == [each["if"]["prefixItems"][1]["const"]]:  # fmt: skip
                yield from validator.descend(instance, each, schema_path=index)

    # JSON Schema counts 1.0 as an integer; a directive does not.
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, v: type(v) is int)
    return extend(Draft202012Validator, {"allOf": all_of}, type_checker=checker)(schema())
