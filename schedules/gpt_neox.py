"""Sharding rules for GPT-NeoX (Pythia): parallel attention and feed-forward. Weights are [out, in].

In shapes: D hidden, F ffn, V vocabulary; n is the number of tp ranks. In the fused linear, q, k and v
of a head are 3 * head_dim adjacent outputs, which are never split.
"""

from slapo_zoo.zoo.rules import attention, column, enter, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

GPT_NEOX = register(
    Table(
        model_type="gpt_neox",
        source="transformers 5.23.0, models/gpt_neox/modeling_gpt_neox.py",
        dims={
            "num_heads": "num_attention_heads",
            "head_dim": "hidden_size // num_attention_heads",
            "qkv_dim": "3 * hidden_size // num_attention_heads",
        },
        body=(
            # module                                rule                       per rank
            ("embed_in",                            vocab),                  # [ceil(V/n), D], y summed over tp
            ("layers.*.input_layernorm",            whole),                  # [D]
            ("layers.*.attention",                  enter),                  # dx summed over tp
            ("layers.*.attention",                  attention("num_heads")),
            ("layers.*.attention.query_key_value",  column(0, "qkv_dim")),   # [3 * D/n, D]
            ("layers.*.attention.dense",            row(1, "head_dim")),     # [D, D/n], y summed over tp
            ("layers.*.post_attention_layernorm",   whole),                  # [D]
            ("layers.*.mlp",                        enter),                  # dx summed over tp
            ("layers.*.mlp.dense_h_to_4h",          column(0)),              # [F/n, D]
            ("layers.*.mlp.dense_4h_to_h",          row(1)),                 # [D, F/n], y summed over tp
            ("final_layer_norm",                    whole),                  # [D]
        ),
        heads=(
            ("lm_head",                             vocab_head),             # [ceil(V/n), D], may be tied
        ),
        blocks=("layers.*",),
        renames=(("embed_out.", "lm_head."),),
    )
)
