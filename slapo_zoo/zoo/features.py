"""Features (tp, pp, sequence parallelism, ...) of each model family, read from its table of sharding rules."""

from collections.abc import Callable, Iterator
from typing import Any

from slapo_zoo.language.directive import Directive
from slapo_zoo.language.primitives import (
    CoreAttentionSeam,
    ExpertParallel,
    Shard,
    Sync,
    SyncBatchNorm,
)
from slapo_zoo.zoo.table import Table, families, table_for


def _directives(table: Table) -> Iterator[Directive]:
    for _, rule in (*table.body, *table.heads):
        yield from rule


def _any(kind: type, **wanted: Any) -> Callable[[Table], bool]:
    """Return a function that tells whether a table has a directive (module change) of class `kind` with arguments `wanted`."""

    def found(table: Table) -> bool:
        return any(
            isinstance(d, kind) and all(getattr(d, name) == value for name, value in wanted.items())
            for d in _directives(table)
        )

    return found


FEATURES: dict[str, Callable[[Table], bool]] = {
    "tp": _any(Shard, mesh_dim="tp"),
    "pp": lambda table: bool(table.blocks),
    "sequence_parallel": lambda table: any(
        isinstance(d, Sync) and d.sequence_axis is not None for d in _directives(table)
    ),
    "vocab_parallel": _any(Shard, pad=True),
    "uneven": _any(Shard, uneven=True),
    "shared_kv_heads": _any(Shard, replicate=True),
    "experts": _any(ExpertParallel),
    "attention_seam": _any(CoreAttentionSeam),
    "shared_block": lambda table: bool(table.calls),
    "sync_batch_norm": _any(SyncBatchNorm),
}

MEANINGS = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "sequence_parallel": "tokens sharded over tp between the sharded layers",
    "vocab_parallel": "embedding and logits sharded over the vocabulary",
    "uneven": "sizes that tp does not divide",
    "shared_kv_heads": "more tp ranks than KV heads",
    "experts": "experts sharded over tp",
    "attention_seam": "dropout of attention weights equal on every mesh; attention=",
    "shared_block": "one block with shared weights, run several times",
    "sync_batch_norm": "batch statistics over all ranks",
}


def features() -> dict[str, dict[str, bool]]:
    """Return {model_type: {feature, e.g. "pp": True if the family's table of sharding rules has the feature}}."""
    tables = {name: table_for(name) for name in families()}
    return {
        name: {feature: has(table) for feature, has in FEATURES.items()}
        for name, table in tables.items()
    }
