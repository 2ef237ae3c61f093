"""Derivation of sharding rules from a model: groups of modules that may be sharded, and the rules of each group."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from slapo_zoo.language.primitives import CoreAttentionSeam, ExpertParallel, ForkRng, Shard
from slapo_zoo.language.primitives.sync_batch_norm import SyncBatchNorm
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.zoo.derivation.observe import Observation, linear_axis
from slapo_zoo.zoo.derivation.stacks import find_stacks, order_of, star
from slapo_zoo.zoo.rules import (
    Row,
    Rule,
    attention_of_all,
    column,
    column_joined,
    dropout,
    dropout_tokens,
    enter_once,
    row,
    vocab,
    vocab_head,
    whole,
)  # fmt: skip
from slapo_zoo.zoo.table import Table, base_prefix

LEAST_SHARE = 1e-3  # share of all parameters; a smaller module is not worth a collective
# beside linears, modules whose output can be divided by channels
CONVOLUTIONS = (nn.Conv2d, nn.Conv1d)
synced: Rule = (SyncBatchNorm(),)


@dataclass
class Group:
    """Modules (e.g. the linears of a feed-forward, in all blocks) of which tp shards all or none, with their rules.

    Args:
        name: name of the group: the path pattern of one of its modules.
        rows: (pattern of module paths, rule) for each of its modules.
        parameters: number of parameters that are sharded.
        divides: path patterns of the modules that hold these parameters.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    parameters: int = 0
    divides: tuple[str, ...] = ()


def output_axis(module: nn.Module) -> int | None:
    """Return the axis of a module's weight that belongs to its outputs; None if the outputs cannot be sharded."""
    for cls in CONVOLUTIONS:
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return 0 if module.groups == 1 and "weight" in module._parameters else None
    return linear_axis(module)


class Modules:
    """Modules of a model on meta, `patterns` {"layers.*.fc": modules}, and the record of a tiny model's forward, `seen`."""

    def __init__(self, model: Any, seen: Observation):
        self.model, self.seen = model, seen
        self.total = sum(p.numel() for p in model.parameters()) or 1
        self.embedding = None
        with suppress(NotImplementedError):  # a model without text has none
            self.embedding = model.get_input_embeddings()
        self.foreign = {star(name) for name in seen.foreign}
        self.patterns: dict[str, list[nn.Module]] = {}
        kinds: dict[str, set[str]] = {}
        for path, module in model.named_modules():
            kinds.setdefault(star(path), set()).add(type(module).__name__)
        self.owners: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                kind = f":{type(module).__name__}" if len(kinds[star(path)]) > 1 else ""
                pattern = star(path) + kind
                self.patterns.setdefault(pattern, []).append(module)
                for p in module._parameters.values():
                    if p is not None:
                        self.owners.setdefault(id(p), []).append(pattern)

    def size(self, pattern: str) -> int:
        """Return the number of parameters in the modules whose paths match `pattern`."""
        return sum(p.numel() for m in self.patterns[pattern] for p in m._parameters.values() if p is not None)  # fmt: skip

    def own_only(self, pattern: str) -> bool:
        """Return whether no other module read the parameters of the modules at `pattern` in the recorded forward."""
        path = pattern.partition(":")[0]
        names = (f"{path}.{name}" for m in self.patterns[pattern] for name in m._parameters)
        return not self.foreign.intersection(names)

    def shardable(self, pattern: str) -> bool:
        """Return whether tp may shard the modules at `pattern`: untied linears with 0.1 % or more of all parameters."""
        alike = self.patterns.get(pattern, [])
        return (
            bool(alike)
            and all(linear_axis(m) == linear_axis(alike[0]) is not None for m in alike)
            and self.own_only(pattern)
            and not self.tied(pattern)
            and self.size(pattern) >= LEAST_SHARE * self.total
        )

    def tied(self, pattern: str) -> list[str]:
        """Return the path patterns of the other modules that share a weight with the modules at `pattern`."""
        ids = {id(m._parameters.get("weight")) for m in self.patterns[pattern]} - {id(None)}
        return sorted({name for i in ids for name in self.owners.get(i, ())} - {pattern})


def undivided_table(config: Any, model: Any) -> Table:
    """Return a table of rules that shards nothing and forbids micro-batches, for a model without derivable rules."""
    return replace(derive_table(config, model, Observation(), None), undivided=True)


def derive_table(
    config: Any, model: Any, seen: Observation, left_whole: Mapping[str, str] | None,
    chains: bool = True, only: Collection[str] | None = None, stack: str = "", tokens: bool = False,
) -> Table:  # fmt: skip
    """Return a table of sharding rules derived from one observed forward; no model was run with these rules yet.

    Args:
        config: config of the model.
        model: the model on the meta device.
        seen: record of a forward of a tiny model of the same family.
        left_whole: name of a group of modules that stays unsharded --> the reason; None: all stay so, {}: none has to.
        chains: True shards the linears of a feed-forward together; False lets each linear gather its output.
        only: names (path pattern of one module) of the groups that may be sharded; None allows all.
        stack: pattern of the only list of blocks that a pipeline may cut, e.g. "layers.*"; "" allows all.
        tokens: True if the table must serve sequence parallelism too.
    """
    modules = Modules(model, seen)
    groups = [] if left_whole is None else find_groups(modules, chains)
    groups = [group for group in groups if group.name not in (left_whole or ())]
    groups = [group for group in groups if only is None or group.name in only]
    rows = [row for group in groups for row in group.rows]
    named = {pattern for pattern, _ in rows}
    rest = {p: alike[0] for p, alike in modules.patterns.items() if p not in named}
    rows += [(p, synced if type(m) is nn.BatchNorm2d and m.momentum else whole) for p, m in rest.items()]  # fmt: skip
    prefix = base_prefix(model)
    stacks = [found for found in find_stacks(model, seen) if stack in ("", found)]
    parts = tuple(parts_of_blocks(model, stacks)) if tokens else ()
    for pattern in sorted({star(path) for path in (*seen.draws, *seen.idle(model)) if path}):
        some = tokens and _below(pattern, stacks) and not _below(pattern, parts)
        rows.append((pattern, dropout_tokens if some else dropout))
    return Table(
        model_type=config.model_type,
        source=f"derived from {type(model).__name__}",
        dims={},
        body=tuple((p.removeprefix(prefix), rule) for p, rule in rows if p.startswith(prefix)),
        heads=tuple(row for row in rows if not row[0].startswith(prefix)),
        blocks=tuple(stack.removeprefix(prefix) for stack in stacks),
        order=order_of(model, seen, stacks),
        everywhere=tuple(p.removeprefix(prefix) for p in sorted(seen.wanted_everywhere)),
        all_tokens=tuple(part.removeprefix(prefix) for part in parts),
        seam=False,
        **what_was_seen(config, model, seen),
    )


def with_seams(table: Table, model: Any) -> Table:
    """Return `table` with a seam for each attention that calls transformers' AttentionInterface and has no seam yet.

    A seam is a child `core_attn` that computes softmax(q k^T) v, here of all heads; cp needs it to shard the tokens.
    """
    prefix, rows = base_prefix(model), (*table.body, *table.heads)
    have = {p for p, rule in rows if any(isinstance(d, CoreAttentionSeam) for d in rule)}
    found = dict.fromkeys(star(path) for path, m in model.named_modules() if _calls_interface(m))
    body = [p.removeprefix(prefix) for p in found if p.startswith(prefix)]
    heads = [p for p in found if not p.startswith(prefix)]
    if not found:
        return table
    more = [tuple((p, attention_of_all) for p in of if p not in have) for of in (body, heads)]
    return replace(table, body=(*table.body, *more[0]), heads=(*table.heads, *more[1]), seam=True)


def _calls_interface(module: nn.Module) -> bool:
    """Return whether a module has a method that reads ALL_ATTENTION_FUNCTIONS; False for a PreTrainedModel."""
    every = (f for cls in type(module).__mro__ for f in vars(cls).values() if callable(f))
    methods = map(inspect.unwrap, every)
    codes = (getattr(method, "__code__", None) for method in methods)
    names = (name for code in codes if code is not None for name in code.co_names)
    return not hasattr(module, "base_model_prefix") and "ALL_ATTENTION_FUNCTIONS" in names


def parts_of_blocks(model: Any, stacks: Collection[str]) -> Iterator[str]:
    """Yield the path patterns of those children of blocks that hold weight matrices, e.g. "model.layers.*.mlp".

    With sequence parallelism, these modules need all tokens; the other children work on a rank's own tokens.
    `stacks` are the patterns of the blocks, e.g. "model.layers.*".
    """
    found = {}
    for path, module in model.named_modules():
        block, _, child = star(path).rpartition(".")
        if block in stacks and any(p.ndim > 1 for p in module.parameters()):
            found[f"{block}.{child}"] = None
    yield from found


def _below(pattern: str, others: Iterable[str]) -> bool:
    """Return whether `pattern` is one of the patterns `others` or lies below one, as layers.*.mlp below layers.*."""
    return any(f"{pattern}.".startswith(f"{other}.") for other in others)


def what_was_seen(config: Any, model: Any, seen: Observation) -> dict[str, Any]:
    """Return {field of `Table`: value} that follow from the model's class, config and recorded forward: renames and
    pieces of file keys, shifts_labels, whole_batch (options that forbid to split a batch), batch_statistics.
    """
    by_name = head_of(type(model).__name__).shifts
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    routes = hasattr(config.get_text_config(), "output_router_logits")
    return {
        "renames": seen.spelling.renames,
        "pieces": seen.spelling.pieces,
        "shifts_labels": None if by_name == seen.shifts_labels else seen.shifts_labels,
        "whole_batch": ("output_router_logits",) * routes,
        "batch_statistics": batch_norm,
    }


def find_groups(modules: Modules, chains: bool = True) -> list[Group]:
    """Return the groups of modules of which tp shards all or none (e.g. a feed-forward), the largest first.

    Args:
        modules: modules of the model.
        chains: True: the linears of a feed-forward are one group; False: each linear is one, and gathers its output.
    """
    made = [*(_chains(modules) if chains else ()), *_groups(modules)]
    done: set[str] = set()
    found = []
    for group in made:
        if not done.intersection(group.divides):
            done.update(group.divides)
            found.append(group)
    return sorted(found, key=lambda group: -group.parameters)


def _chains(modules: Modules) -> Iterator[Group]:
    """Yield each feed-forward that is alike in all blocks as a group: column-parallel linears, then a row-parallel one."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for taker, makers in modules.seen.chains.items():
        found.setdefault(star(taker), set()).add(tuple(sorted({star(name) for name in makers})))
    for taker, kinds in found.items():
        makers = next(iter(kinds))
        chain = (*makers, taker)
        if len(kinds) > 1 or len(set(chain)) < len(chain) or not all(map(modules.shardable, chain)):
            continue
        axes = [a for n in chain if (a := linear_axis(modules.patterns[n][0])) is not None]  # all
        width = modules.patterns[makers[0]][0].get_parameter("weight").shape[axes[0]]
        rows = [(n, (*enter_once, *column(axis))) for n, axis in zip(makers, axes, strict=False)]
        rows.append((taker, row(1 - axes[-1], tokens=-1)))
        rows += [
            (path, _dropped(path, makers, width)) for path in sorted(_dropouts(modules, chain))
        ]
        yield Group(taker, rows, sum(map(modules.size, chain)), chain)


def _dropouts(modules: Modules, chain: tuple[str, ...]) -> set[str]:
    """Return the path patterns of dropouts on sharded columns of a feed-forward; `chain`: path patterns of its linears."""
    found = {
        star(path): {star(name) for name in names} for path, names in modules.seen.dropouts.items()
    }
    return {path for path, names in found.items() if names <= {*chain} and names & {*chain[:-1]}}


def _dropped(path: str, makers: tuple[str, ...], width: int) -> Rule:
    """Return the rule by which the dropout at `path`, after the column-parallel linears `makers`, drops the same
    elements of their sharded output as without tp. If a linear of `makers` has the same parent module, the input after
    that linear's call counts as sharded; else each input with fewer than `width` columns, those of all ranks, does.
    """
    beside = path.rpartition(".")[0]
    after = next((n for n in reversed(makers) if n.rpartition(".")[0] == beside), "")
    if after:
        return (ForkRng(axis=-1, after=after.rpartition(".")[2]),)
    return (ForkRng(axis=-1, size=width),)


def _groups(modules: Modules) -> Iterator[Group]:
    done: set[str] = set()
    for pattern in modules.patterns:
        if pattern in done or modules.size(pattern) < LEAST_SHARE * modules.total:
            continue
        family = [pattern, *modules.tied(pattern)]
        rules = [(p, _rule(modules, p)) for p in family]
        if all(rule for _, rule in rules):
            done.update(family)
            yield Group(pattern, rules, modules.size(pattern), tuple(family))


def _rule(modules: Modules, pattern: str) -> Rule:
    """Return the rule that shards each module at `pattern` over tp without a partner layer, e.g. a column-parallel
    linear that gathers its output; `whole` (replicated) if no such rule exists. `modules` are all those of the model.
    """
    first, own = modules.patterns[pattern][0], modules.own_only(pattern)
    if not own or len({type(module) for module in modules.patterns[pattern]}) > 1:
        return whole
    if isinstance(first, nn.Embedding):
        is_large = first.num_embeddings >= 16 * first.embedding_dim
        is_large = is_large and type(first).forward is nn.Embedding.forward
        return vocab if modules.embedding is first or is_large else whole
    if modules.patterns[pattern][0] is modules.model.get_output_embeddings() and isinstance(first, nn.Linear):  # fmt: skip
        return vocab_head
    axes = {output_axis(module) for module in modules.patterns[pattern]}
    (axis, *others) = axes
    if axis is not None and not others:
        return column_joined(axis)
    return _experts(first)


def _experts(module: nn.Module) -> Rule:
    """Return the rule that shards a module of stacked experts, or `whole` (replicated) for any other module.

    The forward of stacked experts takes tokens, expert indices and weights; axis 0 of the parameters counts experts.
    """
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(takes) != 3 or takes[0] != "hidden_states" or "ind" not in takes[1]:
        return whole
    count = getattr(module, "num_experts", None)
    own = {name: p for name, p in module._parameters.items() if p is not None}
    odd = any(p.ndim < 2 or p.shape[0] != count for p in own.values())
    if not isinstance(count, int) or count < 2 or odd:
        return whole
    if any(True for _ in module.children() if any(True for _ in _.parameters())):
        return whole
    return (*(Shard(name, 0, uneven=True) for name in own), ExpertParallel())
