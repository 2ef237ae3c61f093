"""Derivation of sharding rules (a table) from the `base_model_tp_plan` that `transformers` has for a family.

The plan says which linears are sharded; the language-model head, stacked experts and replicated modules are read from
the module tree. Such a table is a guess until `verify.derive` has compared a model sharded by it with the plain model.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from slapo_zoo.language.directive import join
from slapo_zoo.language.primitives import CoreAttentionSeam, ExpertParallel, Shard, Sync
from slapo_zoo.parallel.paths import select
from slapo_zoo.zoo.derivation.observe import Observation
from slapo_zoo.zoo.derivation.stacks import star
from slapo_zoo.zoo.derivation.table_rows import Modules, find_groups, what_was_seen
from slapo_zoo.zoo.rules import (
    Row,
    Rule,
    attention,
    column,
    enter,
    kv_groups,
    row,
    vocab,
    vocab_head,
    whole,
    whole_on_heads,
)  # fmt: skip
from slapo_zoo.zoo.schedule_source import refusal
from slapo_zoo.zoo.table import Table, base_prefix

QUERY, KEYS = ("q_proj",), ("k_proj", "v_proj")
LEAVE_ALONE = ("replicate", "embedding_rowwise")
# The weight is sharded, the output gathered: all ranks use the same output, so its gradient is complete.
gathered: Rule = (
    Shard("weight", 0),
    Shard("bias", 0),
    Sync("fwd_post", "all_gather", tensor_parallel_output_grad=False),
)
split_input: Rule = (
    Sync("fwd_pre", "scatter"),
    Shard("weight", 1),
    Sync("fwd_post", "all_reduce", sequence_axis=1),
)


def plan_of(config: Any) -> dict[str, str]:
    """Return transformers' tp plan for a config, {pattern of base model paths: style such as "colwise"}; {} if none."""
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def table_of_plan(config: Any, model: Any, seen: Observation) -> Table:
    """Return a table of sharding rules made from the tp plan of transformers; no model was run with these rules yet.

    Args:
        config: config of the model.
        model: the model on the meta device.
        seen: record of a forward of a tiny model of the same family.

    Raises:
        ArchitectureError: no rule corresponds to a style of the plan or to a module.
    """
    plan, prefix = plan_of(config), base_prefix(model)
    base = model.get_submodule(prefix.rstrip(".")) if prefix else model
    modules = dict(base.named_modules())
    found = {pattern: _first_match(pattern, modules) for pattern in plan}
    experts = _expert_rows(model, seen, prefix)
    plan = {
        pattern: style
        for pattern, style in plan.items()
        if found[pattern] is not None and pattern not in experts
    }
    body = list(_plan_rows(config, plan, modules))
    embedding = base.get_input_embeddings()
    rest = dict.fromkeys(star(path) for path, m in modules.items() if _own(m))
    divided = {pattern for pattern, _ in body} | plan.keys()
    for pattern in rest:
        if pattern not in divided:
            is_embedding = _first_match(pattern, modules) is embedding
            body.append((pattern, vocab if is_embedding else experts.get(pattern, whole)))
    seam = any(isinstance(d, CoreAttentionSeam) for _, rule in body for d in rule)
    _refuse_dropout(config, seam)
    return Table(
        model_type=config.model_type,
        source=f"base_model_tp_plan of {type(config).__name__}",
        dims=_dims(config),
        body=tuple(body),
        heads=tuple(_head_rows(model)),
        blocks=(_blocks(config, plan, modules),),
        all_tokens=tuple(dict.fromkeys(pattern.rpartition(".")[0] for pattern in experts)),
        seam=seam,
        **what_was_seen(config, model, seen),
    )


def _expert_rows(model: Any, seen: Observation, prefix: str) -> dict[str, Rule]:
    """Return {pattern of module paths: rule that shards experts over tp} for modules that hold all experts of a layer.

    The patterns are relative to the base model, whose path is `prefix`. `seen` is the observed forward of a tiny model.
    """
    rows = [row for group in find_groups(Modules(model, seen)) for row in group.rows]
    return {pattern.removeprefix(prefix): rule for pattern, rule in rows
            if any(isinstance(d, ExpertParallel) for d in rule)}  # fmt: skip


def _refuse_dropout(config: Any, seam: bool) -> None:
    """Raise ArchitectureError if the config has dropout, since a tp plan does not say which modules drop.

    If `seam` is True, dropout of attention is allowed: the attention goes through transformers' AttentionInterface.
    """
    for name, value in vars(config).items():
        if not isinstance(value, float) or not value or (seam and name == "attention_dropout"):
            continue
        if "dropout" in name or name.endswith("pdrop"):
            problem = f"found {name}={value}, and the tp plan does not say which modules drop"
            raise refusal(config, problem, f"pass {name}=0.0, or write a table of sharding rules (docs/adding_an_architecture.md)")  # fmt: skip


def _own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _first_match(pattern: str, modules: Mapping[str, nn.Module]) -> Any:
    """Return the first module in `modules` (path --> module) whose path matches a pattern, or None."""
    names = {path: type(module).__name__ for path, module in modules.items()}
    paths = select(pattern, names)
    return modules[paths[0]] if paths else None


def _dims(config: Any) -> dict[str, Any]:
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        hint = "pass config.get_text_config(), the config of the text model"
        raise refusal(config, "the config has no num_attention_heads", hint)

    kv = "num_key_value_heads"
    kv = kv if isinstance(getattr(config, kv, None), int) else "num_attention_heads"
    has_size = isinstance(getattr(config, "head_dim", None), int)
    return {
        "num_heads": "num_attention_heads",
        "kv_heads": kv,
        "per_kv": f"num_attention_heads // {kv}",
        "head_dim": "head_dim" if has_size else "hidden_size // num_attention_heads",
    }


def _plan_rows(
    config: Any, plan: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> Iterator[Row]:
    """Yield (pattern of module paths, sharding rule) for the modules in the tp plan `plan`, grouped by parent module.

    `modules` maps paths in the base model to modules.
    """
    parents = dict.fromkeys(pattern.rpartition(".")[0] for pattern in plan)
    for parent in parents:
        children = {
            pattern.rpartition(".")[2]: style
            for pattern, style in plan.items()
            if pattern.rpartition(".")[0] == parent and style not in LEAVE_ALONE
        }
        if not children:
            continue
        heads = all(children.get(name) == "colwise" for name in (*QUERY, *KEYS))
        yield parent, enter
        if heads:
            yield parent, attention("num_heads", together="per_kv")
            if hasattr(_first_match(parent, modules), "num_key_value_groups"):
                yield parent, kv_groups("num_key_value_groups", "kv_heads")
        for name, style in children.items():
            pattern = join(parent, name)
            yield pattern, _rule(config, style, name, pattern, heads)


def _rule(config: Any, style: str, name: str, pattern: str, heads: bool) -> Rule:
    """Return the sharding rule for `style`, which the tp plan gives to the linear or norm at `pattern`; `name` is the
    pattern's last part, `heads` is True if the parent is an attention. ArchitectureError for a style without a rule.
    """
    unit, together = ("head_dim", "per_kv") if heads else ("", "")
    rules = {
        "rowwise": row(1, unit, together),
        "colwise_gather_output": gathered,
        "rowwise_split_input": split_input,
        "replicated_with_grad_allreduce": whole_on_heads,
    }
    if heads and style == "colwise":
        if name in KEYS:
            return column(0, "head_dim", kv=True)
        if name not in QUERY:
            problem = f"the tp plan shards {pattern}, which is none of q, k and v"
            raise refusal(config, problem)
        return column(0, unit, together=together)
    if style == "colwise":
        return column(0)
    if style not in rules:
        problem = f"the tp plan has the style {style!r} for {pattern}"
        hint = f"write a table of sharding rules (docs/adding_an_architecture.md); known styles: {', '.join(['colwise', *rules])}"
        raise refusal(config, problem, hint)
    return rules[style]


def _head_rows(model: Any) -> Iterator[Row]:
    """Yield the table row, (module pattern, sharding rule), of the language-model head, if the model class has one."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if head is not None and module is head:
            yield path, vocab_head


def _blocks(config: Any, plan: Mapping[str, str], modules: Mapping[str, nn.Module]) -> str:
    """Return the pattern of the repeated blocks, e.g. "layers.*": the plan's first pattern with a star, up to the star."""
    for pattern in plan:
        if found := re.match(r"(.*?)\.\*", pattern):
            return f"{found[1]}.*"
    raise refusal(config, "found no repeated blocks, such as layers.*, in the tp plan")
