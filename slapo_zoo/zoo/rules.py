"""Rules: tuples of directives that rows of a table name; `Dim` stands for a number of the config."""

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
    """A number of the config, named in a table and known when the schedule is made."""

    name: str


Rule = tuple[Directive, ...]
Row = tuple[str, Rule]


def _dim(name: str) -> Any:
    """The dim of a name; 1, a directive's own default, for none."""
    return Dim(name) if name else 1


def column(
    axis: int = 0,
    unit: str = "",
    groups: tuple[str, ...] = (),
    together: str = "",
    kv: bool = False,
    shared: str = "",
) -> Rule:
    """Each rank computes some outputs: the weight (and bias) divided along its output axis.

    Args:
        axis: output axis of the weight.
        unit: dim that stays whole (head_dim).
        groups: dims of parts that are sharded one by one (q|k|v).
        together: dim: query heads per KV head; of groups, the first is that of the queries.
        kv: heads of keys or values: shared by neighbouring ranks when there are too few.
        shared: dim: outputs at the end that all ranks use (k and v of the only KV head).
    """
    how: dict[str, Any] = {"unit": _dim(unit), "together": _dim(together), "replicate": kv}
    how |= {"shared": Dim(shared)} if shared else {}
    sizes: Any = tuple(Dim(name) for name in groups)
    weight = Shard("weight", axis, groups=sizes, uneven=True, **how)
    return (weight, Shard("bias", 0, groups=sizes, uneven=True, **how))


def row(axis: int = 1, unit: str = "", together: str = "", tokens: int = 1) -> Rule:
    """Shard a row-parallel linear: a rank holds some inputs, the product is all-reduced over tp, the bias added once.

    Args:
        axis: input axis of the weight, which is sharded.
        unit: name of a dim that is not split (head_dim).
        together: name of the dim that counts query heads of one KV head, which stay on one rank.
        tokens: axis of tokens, which sequence parallelism divides; -1 keeps them whole here.
    """
    how: dict[str, Any] = {"unit": _dim(unit), "together": _dim(together)}
    leave = Sync("fwd_post", "all_reduce", sequence_axis=tokens if tokens >= 0 else None)
    return (Shard("weight", axis, uneven=True, **how), leave)


def attention(num_heads: str, *attributes: tuple[str, str], together: str = "") -> Rule:
    """The seam `core_attn`, and attributes that count heads: ("split_size", "head_dim")."""
    return (CoreAttentionSeam(_dim(num_heads), together=_dim(together)), *sizes(*attributes))


def sizes(*attributes: tuple[str, str], together: str = "", kv: bool = False) -> Rule:
    """Attributes that count heads, or columns of whole heads: ("embed_dim", "head_dim"); `kv` as in `column`."""
    return tuple(
        ShardAttribute(name, _dim(unit), _dim(together), replicate=kv) for name, unit in attributes
    )


def kv_groups(attribute: str, kv_heads: str) -> Rule:
    """Query heads per KV head, which shrink only with more ranks than KV heads."""
    return (ShardAttribute(attribute, keep=_dim(kv_heads)),)


def heads_of(argument: str, num_heads: str, axis: int = 0) -> Rule:
    """An argument made for the heads of all rows: each rank takes its heads, if there are such."""
    return (ShardArgument(argument, _dim(num_heads), axis),)


def vocab_bias(linear: str) -> Rule:
    """A head that adds a bias of its own to what its child `linear` makes, a `vocab_head`."""
    return (Shard("bias", 0, pad=True), VocabBias(linear))


def norm_of_heads(unit: str, together: str = "", kv: bool = False) -> Rule:
    """RMSNorm of the columns of all heads at once, which a `column` of the same arguments made."""
    return (*column(0, unit, together=together, kv=kv), SyncRMSNorm())


def column_joined(axis: int = 0) -> Rule:
    """Each rank computes some outputs, then all ranks get all of them: what follows is whole."""
    divided = (Shard("weight", axis, pad=True), Shard("bias", 0, pad=True))
    return (*divided, Sync("bwd_post", "all_reduce"), Sync("fwd_post", "join_columns"))


def row_inside(axis: int = 1) -> Rule:
    """Row parallel where each rank goes on with its own channels: the gradient is summed too."""
    return (Shard("weight", axis, uneven=True), Sync("fwd_post", "all_reduce_twice"))


def bare(*param_names: str) -> Rule:
    """Shard parameters of the module itself, such as a scale per channel, along axis 0."""
    return tuple(Shard(name, 0, uneven=True) for name in param_names)


def experts(*param_names: str) -> Rule:
    """Each rank holds some experts, on axis 0 of their parameters; the router is whole."""
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
whole: Rule = ()  # every rank holds all of it; within blocks it sees this rank's tokens
whole_on_heads: Rule = (SumGradient("weight"),)  # used on this rank's heads only
dropout: Rule = (ForkRng(),)
dropout_tokens: Rule = (ForkRng(tokens=True),)  # with sequence parallelism it sees some tokens


def dropout_on(axis: int, size: str) -> Rule:
    """Dropout of an activation that is sharded over tp along an axis."""
    return (ForkRng(axis=axis, size=_dim(size)),)


dropout_of_all: Rule = (ForkRng(rows=False),)  # of what all batch rows share


def dropout_after(child: str, size: str) -> Rule:
    """Dropout of whole tokens, and of the sharded result of a child that F.dropout follows."""
    return (ForkRng(tokens=True, after=child, axis=-1, size=_dim(size)),)
