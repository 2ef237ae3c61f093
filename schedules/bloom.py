"""Sharding rules for BLOOM: ALiBi biases are computed once for all blocks. Weights are [out, in].

In shapes: D hidden, H heads, V vocabulary; n is the number of tp ranks. In the fused linear, q, k and v
of a head are 3 * head_dim adjacent outputs, which are never split.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.zoo.rules import (
    column, dropout_on, dropout_tokens, enter, heads_of, row, sizes, vocab, vocab_head, whole,
)  # fmt: skip
from slapo_zoo.zoo.table import Table, register

BLOOM = register(
    Table(
        model_type="bloom",
        source="transformers 5.23.0, models/bloom/modeling_bloom.py",
        dims={
            "num_heads": "n_head",
            "head_dim": "hidden_size // n_head",
            "qkv_dim": "3 * hidden_size // n_head",
        },
        body=(
            # module                              rule                            per rank
            ("word_embeddings",                   vocab),                       # [ceil(V/n), D], y summed over tp
            ("word_embeddings_layernorm",         whole),                       # [D]
            ("h.*.input_layernorm",               whole),                       # [D]
            ("h.*.self_attention",                enter),                       # dx summed over tp
            ("h.*.self_attention",                sizes(("num_heads", ""))),
            ("h.*.self_attention",                heads_of("alibi", "num_heads")),  # [B * H/n, 1, S]
            ("h.*.self_attention",                dropout_tokens),              # its F.dropout before the residual
            ("h.*.self_attention.query_key_value", column(0, "qkv_dim")),       # [3 * D/n, D]
            ("h.*.self_attention.attention_dropout", dropout_on(1, "num_heads")),  # probabilities [B, H/n, S, S]
            ("h.*.self_attention.dense",          row(1, "head_dim")),          # [D, D/n], y summed over tp
            ("h.*.post_attention_layernorm",      whole),                       # [D]
            ("h.*.mlp",                           enter),                       # dx summed over tp
            ("h.*.mlp",                           dropout_tokens),              # its F.dropout before the residual
            ("h.*.mlp.dense_h_to_4h",             column(0)),                   # [4 * D/n, D]
            ("h.*.mlp.dense_4h_to_h",             row(1)),                      # [D, 4 * D/n], y summed over tp
            ("ln_f",                              whole),                       # [D]
        ),
        heads=(
            ("lm_head",                           vocab_head),                  # [ceil(V/n), D], tied to word_embeddings
        ),
        blocks=("h.*",),
        tunable=tunable(attention=("eager",)),
        seam=False,
        needs=(("slow_but_exact", False),),  # it reads weights past the rows' sums
    )
)  # fmt: skip
