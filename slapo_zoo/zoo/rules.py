"""Sharding rules for tables of model families: each function returns the changes (directives) of one kind of module."""

from dataclasses import dataclass
from typing import Any

from slapo_zoo.language.directive import Directive
from slapo_zoo.language.primitives import (
    CoreAttentionSeam,
    ExpertParallel,
    ForkRng,
    Shard,
    ShardArgument,
    ShardAttribute,
    SumGradient,
    Sync,
    SyncRMSNorm,
    VocabBias,
)


@dataclass(frozen=True)
class Dim:
    """Placeholder in a rule for a size of a model, e.g. Dim("head_dim"): applying the rule puts the number there."""

    name: str


Rule = tuple[Directive, ...]
Row = tuple[str, Rule]


def _dim(name: str) -> Any:
    """Return `Dim(name)`, the placeholder for the size called `name` in the family's table; 1 for ""."""
    return Dim(name) if name else 1


def column(
    axis: int = 0,
    unit: str = "",
    groups: tuple[str, ...] = (),
    together: str = "",
    kv: bool = False,
    shared: str = "",
) -> Rule:
    """Return the sharding rule of a column-parallel linear: weight and bias are sharded over tp along the output axis.

    Sizes are given by name, such as "head_dim"; the family's table computes them from the config (`Table.dims`).

    Args:
        axis: output axis of the weight.
        unit: name of the number of neighbouring outputs that stay on one rank, e.g. "head_dim"; "" is 1.
        groups: names of the sizes of consecutive slices of the outputs (q|k|v); every rank gets a shard of each slice.
        together: name of the number of query heads per KV head; they share a rank if possible; `groups[0]` holds them.
        kv: True if the outputs are KV heads: with fewer heads than ranks, neighbouring ranks hold the same head.
        shared: name of the number of last outputs that all ranks use (k and v of the only KV head); "" for none.
    """
    how: dict[str, Any] = {"unit": _dim(unit), "together": _dim(together), "replicate": kv}
    how |= {"shared": Dim(shared)} if shared else {}
    sizes: Any = tuple(Dim(name) for name in groups)
    weight = Shard("weight", axis, groups=sizes, uneven=True, **how)
    return (weight, Shard("bias", 0, groups=sizes, uneven=True, **how))


def row(axis: int = 1, unit: str = "", together: str = "", tokens: int = 1) -> Rule:
    """Return the sharding rule of a row-parallel linear: inputs sharded, output all-reduced before the bias is added.

    Args:
        axis: input axis of the weight, which is sharded.
        unit: name in `Table.dims` of the number of neighbouring inputs that stay on one rank, e.g. "head_dim"; "" is 1.
        together: name there of the number of query heads per KV head ("" is 1); a rank gets all query heads of a KV
            head, or an equal part of them if there are more ranks than KV heads.
        tokens: axis of the output that sequence parallelism shards; -1 leaves the tokens unsharded.
    """
    how: dict[str, Any] = {"unit": _dim(unit), "together": _dim(together)}
    leave = Sync("fwd_post", "all_reduce", sequence_axis=tokens if tokens >= 0 else None)
    return (Shard("weight", axis, uneven=True, **how), leave)


def attention(num_heads: str, *attributes: tuple[str, str], together: str = "") -> Rule:
    """Return the sharding rule of an attention module: a child `core_attn` that computes softmax(q k^T) v is added, and
    attributes become this rank's numbers. `num_heads` and `together` are the names in `Table.dims` of the numbers of
    query heads and of query heads per KV head ("": 1). Each of `attributes` is (name of an attribute, name in
    `Table.dims` of what it counts per head): ("num_heads", "") counts heads, ("embed_dim", "head_dim") columns.
    """
    return (CoreAttentionSeam(_dim(num_heads), together=_dim(together)), *sizes(*attributes))


def sizes(*attributes: tuple[str, str], together: str = "", kv: bool = False) -> Rule:
    """Return the sharding rule that sets a module's attributes to this tp rank's share. Each of `attributes` is (name
    of an attribute, name in `Table.dims` of what it counts per head): ("num_heads", "") counts heads, ("embed_dim",
    "head_dim") columns. `together` names the number of query heads per KV head ("": 1), which stay on one rank. `kv`
    True: the attributes count KV heads; with fewer of them than ranks, each rank has one.
    """
    return tuple(
        ShardAttribute(name, _dim(unit), _dim(together), replicate=kv) for name, unit in attributes
    )


def kv_groups(attribute: str, kv_heads: str) -> Rule:
    """Return the sharding rule of an attention's `attribute`, the number of query heads per KV head: it is divided by
    the number of tp ranks per KV head if that is over 1. `kv_heads` names the number of KV heads in `Table.dims`.
    """
    return (ShardAttribute(attribute, keep=_dim(kv_heads)),)


def heads_of(argument: str, num_heads: str, axis: int = 0) -> Rule:
    """Return the sharding rule that slices `argument`, an argument of the module's forward that holds all heads along
    `axis`, to this rank's heads. `num_heads` is the name of the number of heads in the family's table of sizes.
    """
    return (ShardArgument(argument, _dim(num_heads), axis),)


def vocab_bias(linear: str) -> Rule:
    """Return the sharding rule of a head that holds the bias itself, while its child `linear` (rule `vocab_head`) makes
    the logits: the bias is sharded over the vocabulary, and each tp rank adds its shard to its shard of the logits.
    """
    return (Shard("bias", 0, pad=True), VocabBias(linear))


def norm_of_heads(unit: str, together: str = "", kv: bool = False) -> Rule:
    """Return the sharding rule of an RMSNorm over all heads that a linear with `column(0, unit, together=..., kv=...)`
    makes: its weight is sharded as the linear's outputs are, and the mean of squares is taken over all tp ranks.
    """
    return (*column(0, unit, together=together, kv=kv), SyncRMSNorm())


def column_joined(axis: int = 0) -> Rule:
    """Return the sharding rule of a column-parallel linear (output axis `axis`) with an all-gather of the output."""
    divided = (Shard("weight", axis, pad=True), Shard("bias", 0, pad=True))
    return (*divided, Sync("bwd_post", "all_reduce"), Sync("fwd_post", "join_columns"))


def row_inside(axis: int = 1) -> Rule:
    """Return the sharding rule of a row-parallel linear (input axis `axis`) whose all-reduced output each rank uses for
    its own channels only. The gradient of this output is then a partial sum on each rank, and is all-reduced too.
    """
    return (Shard("weight", axis, uneven=True), Sync("fwd_post", "all_reduce_twice"))


def bare(*param_names: str) -> Rule:
    """Return the rule that shards parameters `param_names` of a module, such as a channel scale, over tp on axis 0."""
    return tuple(Shard(name, 0, uneven=True) for name in param_names)


def experts(*param_names: str) -> Rule:
    """Return the sharding rule of stacked experts: `param_names` are sharded over tp on axis 0, the router is not."""
    return (*(Shard(name, 0, uneven=True) for name in param_names), ExpertParallel())


# With sequence parallelism `enter` gathers the tokens and `row` divides them again.
enter: Rule = (Sync("bwd_post", "all_reduce", sequence_axis=1),)
enter_flat: Rule = (Sync("bwd_post", "all_reduce", sequence_axis=0),)  # tokens flattened (OPT)
enter_whole: Rule = (Sync("bwd_post", "all_reduce"),)  # an input that always holds all tokens
enter_once: Rule = (Sync("bwd_post", "all_reduce", shared=True),)  # q, k, v of one such input
all_tokens: Rule = (Sync("fwd_pre", "join_tokens"), Sync("fwd_post", "divide_tokens"))
vocab: Rule = (Shard("weight", 0, pad=True), Sync("fwd_post", "all_reduce"))
vocab_head: Rule = (
    Shard("weight", 0, pad=True),
    Shard("bias", 0, pad=True),
    *enter_whole,
    Sync("fwd_post", "vocab_logits"),
)
whole: Rule = ()  # replicated; within blocks its input is this rank's tokens
whole_on_heads: Rule = (SumGradient("weight"),)  # used on this rank's heads only
dropout: Rule = (ForkRng(),)
attention_of_all: Rule = (CoreAttentionSeam(),)  # all heads on each rank
dropout_tokens: Rule = (ForkRng(tokens=True),)  # with sequence parallelism it sees some tokens


def dropout_on(axis: int, size: str) -> Rule:
    """Return the rule by which a dropout whose input is sharded over tp along `axis` drops the same elements as without
    tp. `size` is the name of the axis's unsharded length, e.g. "num_heads".
    """
    return (ForkRng(axis=axis, size=_dim(size)),)


dropout_of_all: Rule = (ForkRng(rows=False),)  # dropout of a tensor that all batch rows share


def dropout_after(child: str, size: str) -> Rule:
    """Return the rule by which F.dropout in a module's forward drops the same elements as without tp. Its input, when
    it follows a call of the child `child`, is this column-parallel linear's sharded output, which has `size` columns on
    all ranks (a name in `Table.dims`, e.g. "ffn"); any other input is unsharded.
    """
    return (ForkRng(tokens=True, after=child, axis=-1, size=_dim(size)),)
