"""Conversion of a table of sharding rules to Python source, `schedules/<model_type>.py`, e.g. to edit it by hand."""

from collections.abc import Iterator, Mapping
from typing import Any

from slapo_zoo.language.primitives import CoreAttentionSeam, ExpertParallel, Shard, ShardAttribute
from slapo_zoo.zoo import rules
from slapo_zoo.zoo.rules import Dim, Rule
from slapo_zoo.zoo.table import Table

NAMED = ("attention_of_all", "vocab", "vocab_head", "whole", "dropout", "enter", "enter_once", "enter_flat", "enter_whole",
         "whole_on_heads")  # fmt: skip


def to_source(table: Table, per_rank: Mapping[str, str]) -> str:
    """Return the Python source of schedules/<family>.py for a table of sharding rules.

    Args:
        table: a table whose rules name sizes of the config (`Dim("head_dim")`) instead of numbers.
        per_rank: pattern of module paths --> shape of the weight on a rank, which is written as a comment.
    """
    name, used = table.model_type, set[str]()
    body = list(_rows(table.body, per_rank, used))
    heads = list(_rows(table.heads, per_rank, used))
    fields = [f"    {key}={value!r}," for key, value in _fields(table)]
    functions = sorted(word for word in used if word not in ("Shard", "Sync"))
    primitives = sorted(used & {"Shard", "Sync"})
    lines = [
        f'"""{name}: {table.source}; n is the size of mesh dim tp."""', "",
        *([f"from slapo_zoo.language.primitives import {', '.join(primitives)}"] if primitives else []),
        f"from slapo_zoo.zoo.rules import {', '.join(functions)}",
        "from slapo_zoo.zoo.table import Table, register", "",
        f"{name.upper().replace('-', '_')} = register(", "  Table(",
        f"    model_type={name!r},", f"    source={table.source!r},", f"    dims={dict(table.dims)!r},",
        "    body=(", *body, "    ),", "    heads=(", *heads, "    ),", *fields, "  )", ")", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _fields(table: Table) -> Iterator[tuple[str, Any]]:
    empty = Table(model_type="", source="", dims={}, body=(), heads=(), blocks=())
    for key in ("blocks", "order", "everywhere", "all_tokens", "renames", "pieces", "whole_batch", "seam", "shifts_labels", "undivided",
                "batch_statistics"):  # fmt: skip
        if getattr(table, key) != getattr(empty, key):
            yield key, getattr(table, key)


def _rows(rows: Any, per_rank: Mapping[str, str], used: set[str]) -> Iterator[str]:
    width = max((len(pattern) for pattern, _ in rows), default=0) + 3
    for pattern, rule in rows:
        shape = per_rank.get(pattern, "")
        text = rule_source(rule, used)
        comment = f"  # {shape}" if shape else ""
        quoted = f'"{pattern}",'
        yield f"      ({quoted:<{width}} {text}),{comment}"


def rule_source(rule: Rule, used: set[str]) -> str:
    """Return the Python source of a sharding rule: a call of a function of `rules`, or else a tuple of directives.

    The names that the source must import are added to `used`.
    """
    for name in NAMED:
        if rule == getattr(rules, name):
            used.add(name)
            return name
    for name, options in _calls(rule):
        if rule == getattr(rules, name)(**options):
            used.add(name)
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            return f"{name}({given})"
    if any(isinstance(d, ExpertParallel) for d in rule):
        names = [d.param_name for d in rule if isinstance(d, Shard)]
        used.add("experts")
        return f"experts({', '.join(map(repr, names))})"
    used.update(type(d).__name__ for d in rule)
    return f"({', '.join(_directive(d) for d in rule)},)"


def _calls(rule: Rule) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (function in `slapo_zoo.zoo.rules`, its arguments) of calls that may return `rule`; the caller compares."""
    first = rule[0] if rule else None
    if isinstance(first, Shard):
        unit, together = _name(first.unit), _name(first.together)
        groups = tuple(map(_name, first.groups))
        dims = {"unit": unit, "together": together}
        given = {key: value for key, value in dims.items() if value}
        yield "column_joined", {"axis": first.axis}
        yield "row", {"axis": first.axis, **given}
        yield "column", {"axis": first.axis, **given, **({"groups": groups} if groups else {})}
        yield "column", {"axis": first.axis, **given, "kv": True}
    if isinstance(first, ShardAttribute):
        yield "kv_groups", {"attribute": first.attribute, "kv_heads": _name(first.keep)}
    if isinstance(first, CoreAttentionSeam) and len(rule) == 1:
        together = _name(first.together)
        yield (
            "attention",
            {"num_heads": _name(first.num_heads), **({"together": together} if together else {})},
        )


def _name(value: Any) -> str:
    return value.name if isinstance(value, Dim) else ""


def _directive(directive: Any) -> str:
    given = ", ".join(f"{k}={v!r}" for k, v in directive.arguments().items())
    return f"{type(directive).__name__}({given})"
