"""Sharding rules for Falcon: 7B (one KV head), 40B and 180B (several), RW (one per query head, ALiBi).

In shapes: D hidden, H heads, Q = H * head_dim, F ffn, V vocabulary; n is the number of tp ranks.
q, k and v are in one linear: each KV head stays with its query heads; of a single KV head, each rank computes some
columns of k and v, and all ranks gather them.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.zoo.rules import column, dropout_tokens, enter, heads_of, row, sizes, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

FALCON = register(
    Table(
        model_type="falcon",
        source="transformers 5.23.0, models/falcon/modeling_falcon.py",
        dims={
            "num_heads": "num_attention_heads",
            "head_dim": "hidden_size // num_attention_heads",
            "only": lambda config: int(config.multi_query and not config.new_decoder_architecture),  # one KV head
            "grouped": lambda config: int(bool(config.new_decoder_architecture)),
            "per_kv": "1 + grouped * (num_attention_heads // num_kv_heads - 1)",
            "qkv_dim": "(only + (1 - only) * (per_kv + 2)) * head_dim",
            "shared": "only * 2 * head_dim",
        },
        body=(
            # module                                rule                                          per rank
            ("word_embeddings",                     vocab),                                     # [ceil(V/n), D], y summed over tp
            ("h.*",                                 dropout_tokens),                            # its F.dropout before the residual
            ("h.*.input_layernorm",                 whole),                                     # [D]
            ("h.*.ln_attn",                         whole),                                     # [D]
            ("h.*.ln_mlp",                          whole),                                     # [D]
            ("h.*.self_attention",                  enter),                                     # dx summed over tp
            ("h.*.self_attention",                  sizes(("num_heads", ""), together="per_kv")),
            ("h.*.self_attention",                  sizes(("num_kv_heads", ""), kv=True)),
            ("h.*.self_attention",                  heads_of("alibi", "num_heads", 1)),         # [B, H/n, 1, S]
            ("h.*.self_attention",                  heads_of("attention_mask", "num_heads", 1)),  # [B, H/n, S, S], ALiBi in it
            ("h.*.self_attention.query_key_value",  column(0, "qkv_dim", shared="shared")),     # [(Q + k + v)/n, D]
            ("h.*.self_attention.dense",            row(1, "head_dim", together="per_kv")),     # [D, Q/n], y summed over tp
            ("h.*.post_attention_layernorm",        whole),                                     # [D]
            ("h.*.mlp",                             enter),                                     # dx summed over tp
            ("h.*.mlp.dense_h_to_4h",               column(0)),                                 # [F/n, D]
            ("h.*.mlp.dense_4h_to_h",               row(1)),                                    # [D, F/n], y summed over tp
            ("ln_f",                                whole),                                     # [D]
        ),
        heads=(
            ("lm_head",                             vocab_head),                                # [ceil(V/n), D], tied to word_embeddings
        ),
        blocks=("h.*",),
        tunable=tunable(attention=("sdpa",)),
        seam=False,
        needs=(("attention_dropout", 0.0, "alibi"),),  # torch's attention draws it
    )
)  # fmt: skip
