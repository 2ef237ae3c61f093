"""A table for a family that has none, from the plan that `transformers` has for it.

`base_model_tp_plan` says which linears are divided; what it does not say (heads, shared inputs, what stays
whole) is read from the module tree. Such a table is a guess until `probe` has compared it with the plain model.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from slapo_zoo.language.directive import join
from slapo_zoo.errors import ArchitectureError
from slapo_zoo.parallel.paths import select
from slapo_zoo.language.primitives import CoreAttentionSeam, Shard, Sync
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
)
from slapo_zoo.zoo.table import Table, base_prefix, families, table_for

QUERY, KEYS = ("q_proj",), ("k_proj", "v_proj")
LEAVE_ALONE = ("replicate", "embedding_rowwise")
# Each rank computes all of it from weights of which it holds a part; the parts are gathered, so equal.
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
    """Module pattern below the base model --> style; empty when `transformers` has no plan."""
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def find_table(config: Any, model: Callable[[], Any], schedule: Any) -> Table:
    """The family's table; with schedule="auto" one derived from the plan where there is none.

    Args:
        config: of `transformers`.
        model: makes one of the wanted class, on meta.
        schedule: as in `from_pretrained`.
    """
    if config.model_type in families() or not is_auto(schedule):
        return table_for(config.model_type)
    return derive(config, model())


def is_auto(schedule: Any) -> bool:
    """Whether the schedule is the word "auto"."""
    return isinstance(schedule, str) and schedule == "auto"


def require_table(config: Any, schedule: Any) -> None:
    """ArchitectureError when neither a table nor a plan can serve the config's family."""
    if config.model_type in families():
        return
    plan = plan_of(config)
    if not is_auto(schedule):
        more = '; or pass schedule="auto", which derives a table from the plan of transformers'
        table_for(config.model_type, more if plan else "")
    if not plan:
        problem = "the zoo has no table for it, and transformers no base_model_tp_plan"
        hint = f"write schedules/{config.model_type}.py (CONTRIBUTING.md)"
        raise _refusal(config, problem, hint)


def _refusal(config: Any, problem: str, hint: str) -> ArchitectureError:
    what = f"schedule='auto' for model_type={config.model_type!r}"
    return ArchitectureError("zoo", what, problem, hint)


def derive(config: Any, model: Any) -> Table:
    """The table of a plan, unverified.

    Raises:
        ArchitectureError: a style or a module that it cannot translate.
    """
    plan, prefix = plan_of(config), base_prefix(model)
    base = model.get_submodule(prefix.rstrip(".")) if prefix else model
    modules = dict(base.named_modules())
    found = {pattern: _one(pattern, modules) for pattern in plan}
    plan = {pattern: style for pattern, style in plan.items() if found[pattern] is not None}
    body = list(_plan_rows(config, plan, modules))
    embedding = base.get_input_embeddings()
    rest = dict.fromkeys(_star(path) for path, m in modules.items() if _own(m))
    divided = {pattern for pattern, _ in body} | plan.keys()
    for pattern in rest:
        if pattern not in divided:
            is_embedding = _one(pattern, modules) is embedding
            body.append((pattern, vocab if is_embedding else whole))
    seam = any(isinstance(d, CoreAttentionSeam) for _, rule in body for d in rule)
    _refuse_dropout(config, seam)
    return Table(
        model_type=config.model_type,
        source=f"base_model_tp_plan of {type(config).__name__}",
        dims=_dims(config),
        body=tuple(body),
        heads=tuple(_head_rows(model)),
        blocks=(_blocks(config, plan, modules),),
        seam=seam,
    )


def _refuse_dropout(config: Any, seam: bool) -> None:
    """Where a forward drops inline, each rank would draw a mask of its own; only the seam is known."""
    for name, value in vars(config).items():
        if not isinstance(value, float) or not value or (seam and name == "attention_dropout"):
            continue
        if "dropout" in name or name.endswith("pdrop"):
            problem = f"found {name}={value}, and a plan does not say where it drops"
            raise _refusal(config, problem, f"pass {name}=0.0, or write a table")


def _own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _star(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _one(pattern: str, modules: Mapping[str, nn.Module]) -> Any:
    """One of the modules that a pattern matches, or None."""
    names = {path: type(module).__name__ for path, module in modules.items()}
    paths = select(pattern, names)
    return modules[paths[0]] if paths else None


def _dims(config: Any) -> dict[str, Any]:
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        raise _refusal(
            config, "its config has no num_attention_heads", "use the text model's config"
        )

    def kv_heads(c: Any) -> int:
        return getattr(c, "num_key_value_heads", None) or c.num_attention_heads

    def head_dim(c: Any) -> int:
        return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads

    return {
        "num_heads": "num_attention_heads",
        "kv_heads": kv_heads,
        "per_kv": lambda c: c.num_attention_heads // kv_heads(c),
        "head_dim": head_dim,
    }


def _plan_rows(
    config: Any, plan: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> Iterator[Row]:
    """The rows of the modules that the plan names, parent by parent."""
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
            if hasattr(_one(parent, modules), "num_key_value_groups"):
                yield parent, kv_groups("num_key_value_groups", "kv_heads")
        for name, style in children.items():
            pattern = join(parent, name)
            yield pattern, _rule(config, style, name, pattern, heads)


def _rule(config: Any, style: str, name: str, pattern: str, heads: bool) -> Rule:
    """The rule of one linear or norm."""
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
            problem = f"the plan divides {pattern}, which is none of q, k and v"
            raise _refusal(config, problem, "write a table (docs/adding_an_architecture.md)")
        return column(0, unit, together=together)
    if style == "colwise":
        return column(0)
    if style not in rules:
        problem = f"the plan has the style {style!r} for {pattern}"
        hint = f"known styles: {', '.join(['colwise', *rules])}; write a table for the others"
        raise _refusal(config, problem, hint)
    return rules[style]


def _head_rows(model: Any) -> Iterator[Row]:
    """The language model's head, where the class has one."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if head is not None and module is head:
            yield path, vocab_head


def _blocks(config: Any, plan: Mapping[str, str], modules: Mapping[str, nn.Module]) -> str:
    """The pattern of the repeated blocks: up to the first number of the plan's patterns."""
    for pattern in plan:
        if found := re.match(r"(.*?)\.\*", pattern):
            return f"{found[1]}.*"
    raise _refusal(config, "the plan names no repeated blocks", "write a table")
