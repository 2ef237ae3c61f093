"""Conversion of a table of sharding rules to a `tp_plan` of transformers, which can express some of the rules only."""

from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.language.directive import Directive
from slapo_zoo.language.primitives import Shard, ShardAttribute, SumGradient, Sync
from slapo_zoo.parallel.paths import select_paths

# kind of rule --> style; the kind follows from what the rule does with weight and output
STYLES = {
    ("column", ""): "colwise",
    ("row", "all_reduce"): "rowwise",
    ("vocabulary", "all_reduce"): "embedding_rowwise",
    ("vocabulary", "vocab_logits"): "colwise_gather_output",
    ("column", "join_columns"): "colwise_gather_output",
    ("shared", ""): "replicated_with_grad_allreduce",
}
LINEAR, EMBEDDING = ("Linear",), ("Embedding",)


def tp_plan(table: Any, model: Any) -> dict[str, str]:
    """Return {module pattern: style of `transformers`}, e.g. {"layers.*.mlp.up_proj": "colwise"}.

    Args:
        table: sharding rules of the model's family.
        model: the model, on any device; only its tree and config are read.

    Raises:
        ArchitectureError: no style corresponds to a rule: a Conv1D or another module, groups within a
            weight, attributes that count heads, experts.
    """
    plan: dict[str, str] = {}
    modules = dict(model.named_modules())
    for pattern, rule in table.rows(model):
        found = select_paths(pattern, modules)
        style = _style(pattern, rule, type(modules[found[0]]).__name__) if found else ""
        if style:
            plan[pattern] = style
    return plan


def _style(pattern: str, rule: tuple[Directive, ...], class_name: str) -> str:
    shards = [d for d in rule if isinstance(d, Shard)]
    syncs = [str(d.sync_op_or_fn) for d in rule if isinstance(d, Sync) and d.mode == "fwd_post"]
    if counts := [d.attribute for d in rule if isinstance(d, ShardAttribute) and d.keep == 1]:
        raise _no_style(pattern, f"divides {counts[0]}, a number of heads, by tp")
    if any(isinstance(d, SumGradient) for d in rule):
        return STYLES["shared", ""]
    if not shards:
        return ""
    if any(d.groups for d in shards):
        raise _no_style(pattern, "shards each group of one weight (q, k, v of a fused linear)")
    weight = next((d for d in shards if d.param_name == "weight"), None)
    if weight is None or class_name not in LINEAR + EMBEDDING:
        raise _no_style(pattern, f"shards a {class_name}")
    kind = (
        "vocabulary" if weight.pad and syncs != ["join_columns"] else ("column", "row")[weight.axis]
    )
    found = STYLES.get((kind, syncs[0] if syncs else ""))
    if found is None:
        raise _no_style(pattern, f"is {kind} parallel and then runs the collectives {syncs}")
    return found


def _no_style(pattern: str, what: str) -> ArchitectureError:
    hint = "train the model with AutoScheduledModel, which needs no tp_plan"
    return ArchitectureError("tp_plan", pattern, f"no style of a tp_plan {what}", hint)
