"""Sharding rules for T5, T5 v1.1, Flan-T5 (gated) and encoder-only T5. No Linear has a bias; attention is unscaled.

In shapes: D hidden, I = heads * d_kv, F ffn, V vocabulary, R relative buckets; n is the number of tp ranks.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.language.primitives import Shard
from slapo_zoo.zoo.rules import attention, column, dropout_on, enter, enter_once, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

HEADS = attention("num_heads", ("n_heads", ""), ("inner_dim", "head_dim"))

T5 = register(
    Table(
        model_type="t5",
        source="transformers 5.23.0, models/t5/modeling_t5.py",
        dims={"num_heads": "num_heads", "head_dim": "d_kv", "ffn": "d_ff"},
        body=(),
        heads=(
            # module                          rule                          per rank
            ("**shared",                      vocab),                     # [ceil(V/n), D], y summed over tp
            ("**.embed_tokens",               vocab),                     # tied to shared
            ("**.SelfAttention",              enter),                     # dx summed over tp
            ("**.SelfAttention",              HEADS),
            ("**.EncDecAttention",            enter),                     # dx summed over tp
            ("**.EncDecAttention",            HEADS),
            ("**.EncDecAttention.k",          enter_once),                # d(encoder states) summed over tp
            ("**.EncDecAttention.v",          enter_once),
            ("**.*Attention.q",               column(0, "head_dim")),     # [I/n, D]
            ("**.*Attention.k",               column(0, "head_dim")),     # [I/n, D]
            ("**.*Attention.v",               column(0, "head_dim")),     # [I/n, D]
            ("**.*Attention.o",               row(1, "head_dim")),        # [D, I/n], y summed over tp
            ("**.relative_attention_bias",    (Shard("weight", 1, uneven=True),)),  # [R, heads/n]
            ("**.DenseReluDense",             enter),                     # dx summed over tp
            ("**.DenseReluDense.wi",          column(0)),                 # [F/n, D]
            ("**.DenseReluDense.wi_0",        column(0)),                 # [F/n, D]
            ("**.DenseReluDense.wi_1",        column(0)),                 # [F/n, D]
            ("**.DenseReluDense.dropout",     dropout_on(-1, "ffn")),     # activation [B, S, F/n]
            ("**.DenseReluDense.wo",          row(1)),                    # [D, F/n], y summed over tp
            ("**.layer_norm",                 whole),                     # [D]
            ("**.final_layer_norm",           whole),                     # [D]
            ("lm_head",                       vocab_head),                # [ceil(V/n), D], tied to shared or not
        ),
        blocks=("**encoder.block.*", "**decoder.block.*"),
        cut_tokens={"T5ForConditionalGeneration": "relative"},
        tunable=tunable(attention=("sdpa", "eager", "flex", "xformers")),
    )
)
