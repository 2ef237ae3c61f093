"""Sharding rules for ALBERT: one group of layers runs `num_hidden_layers` times, so its weights are shared.

In shapes: D hidden, E embedding, F ffn, V vocabulary, P positions; n is the number of tp ranks.
"""

from slapo_zoo.zoo.rules import (
    attention,
    column,
    column_joined,
    enter,
    enter_once,
    row,
    vocab,
    vocab_head,
    whole,
)
from slapo_zoo.zoo.table import Table, register

LAYER = "encoder.albert_layer_groups.*.albert_layers.*"

ALBERT = register(
    Table(
        model_type="albert",
        source="transformers 5.23.0, models/albert/modeling_albert.py",
        dims={"num_heads": "num_attention_heads", "head_dim": "hidden_size // num_attention_heads"},
        body=(
            # module                                 rule                       per rank
            ("embeddings.word_embeddings",           vocab),                  # [ceil(V/n), E], y summed over tp
            ("embeddings.position_embeddings",       vocab),                  # [ceil(P/n), E]
            ("embeddings.token_type_embeddings",     whole),                  # [2, E]
            ("embeddings.LayerNorm",                 whole),                  # [E]
            ("encoder.embedding_hidden_mapping_in",  whole),                  # [D, E]
            (f"{LAYER}.attention",                   attention("num_heads", ("num_attention_heads", ""), ("all_head_size", "head_dim"))),
            (f"{LAYER}.attention.query",             enter_once),             # the module's own input is also its residual
            (f"{LAYER}.attention.key",               enter_once),
            (f"{LAYER}.attention.value",             enter_once),
            (f"{LAYER}.attention.query",             column(0, "head_dim")),  # [D/n, D]
            (f"{LAYER}.attention.key",               column(0, "head_dim")),  # [D/n, D]
            (f"{LAYER}.attention.value",             column(0, "head_dim")),  # [D/n, D]
            (f"{LAYER}.attention.dense",             row(1, "head_dim", tokens=-1)),  # [D, D/n], y summed over tp
            (f"{LAYER}.attention.LayerNorm",         whole),                  # [D]
            (f"{LAYER}.ffn",                         enter),                  # dx summed over tp
            (f"{LAYER}.ffn",                         column(0)),              # [F/n, D]
            (f"{LAYER}.ffn_output",                  row(1)),                 # [D, F/n], y summed over tp
            (f"{LAYER}.full_layer_layer_norm",       whole),                  # [D]
            ("pooler",                               whole),                  # [D, D]
        ),
        heads=(
            ("predictions.dense",                    column_joined()),        # [ceil(E/n), D], y joined
            ("predictions.LayerNorm",                whole),                  # [E]
            ("predictions.decoder",                  vocab_head),             # [ceil(V/n), E], tied to word_embeddings
        ),
        blocks=("encoder.albert_layer_groups.*",),
        calls="num_hidden_layers",
        all_tokens=(f"{LAYER}.attention",),  # its residual and LayerNorm lie inside
    )
)
