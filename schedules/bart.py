"""Sharding rules for BART and its relatives: post-norm layers with cross-attention, whose dropout is F.dropout.

In shapes: D hidden, F ffn, V vocabulary, P positions; n is the number of tp ranks.
"""

from slapo_zoo.zoo.rules import (
    attention, column, dropout, dropout_after, enter, enter_once, row, vocab, vocab_head, whole,
)  # fmt: skip
from slapo_zoo.zoo.table import Table, register

BART = register(
    Table(
        model_type="bart",
        source="transformers 5.23.0, models/bart/modeling_bart.py",
        dims={
            "enc_heads": "encoder_attention_heads", "dec_heads": "decoder_attention_heads",
            "enc_ffn": "encoder_ffn_dim", "dec_ffn": "decoder_ffn_dim",
            "enc_head_dim": "d_model // encoder_attention_heads", "dec_head_dim": "d_model // decoder_attention_heads",
        },
        body=(
            # module                              rule                          per rank
            ("**shared",                          vocab),                     # [ceil(V/n), D], y summed over tp
            ("**.embed_tokens",                   vocab),                     # tied to shared
            ("**.embed_positions",                whole),                     # [P, D]
            ("**.layernorm_embedding",            whole),                     # [D]
            ("**encoder",                         dropout),                   # its F.dropout of the embeddings
            ("**decoder",                         dropout),
            ("**encoder.layers.*",                dropout_after("fc1", "enc_ffn")),  # F.dropout of [B, S, F/n] after fc1
            ("**decoder.layers.*",                dropout_after("fc1", "dec_ffn")),
            ("**encoder.layers.*.self_attn",      enter),                     # dx summed over tp
            ("**encoder.layers.*.self_attn",      attention("enc_heads", ("num_heads", ""))),
            ("**encoder.layers.*.*_attn.q_proj",  column(0, "enc_head_dim")),  # [D/n, D]
            ("**encoder.layers.*.*_attn.k_proj",  column(0, "enc_head_dim")),  # [D/n, D]
            ("**encoder.layers.*.*_attn.v_proj",  column(0, "enc_head_dim")),  # [D/n, D]
            ("**encoder.layers.*.*_attn.out_proj", row(1, "enc_head_dim")),   # [D, D/n], y summed over tp
            ("**decoder.layers.*.self_attn",      enter),                     # dx summed over tp
            ("**decoder.layers.*.self_attn",      attention("dec_heads", ("num_heads", ""))),
            ("**decoder.layers.*.encoder_attn",   enter),                     # dx summed over tp
            ("**decoder.layers.*.encoder_attn",   attention("dec_heads", ("num_heads", ""))),
            ("**.encoder_attn.k_proj",            enter_once),                # d(encoder states) summed over tp
            ("**.encoder_attn.v_proj",            enter_once),
            ("**decoder.layers.*.*_attn.q_proj",  column(0, "dec_head_dim")),  # [D/n, D]
            ("**decoder.layers.*.*_attn.k_proj",  column(0, "dec_head_dim")),  # [D/n, D]
            ("**decoder.layers.*.*_attn.v_proj",  column(0, "dec_head_dim")),  # [D/n, D]
            ("**decoder.layers.*.*_attn.out_proj", row(1, "dec_head_dim")),   # [D, D/n], y summed over tp
            ("**.*_attn_layer_norm",              whole),                     # [D]
            ("**.fc1",                            enter),                     # dx summed over tp
            ("**.fc1",                            column(0)),                 # [F/n, D]
            ("**.fc2",                            row(1)),                    # [D, F/n], y summed over tp
            ("**.final_layer_norm",               whole),                     # [D]
        ),
        heads=(
            ("classification_head",               whole),
            ("lm_head",                           vocab_head),                # [ceil(V/n), D], tied to shared
        ),
        blocks=("**encoder.layers.*", "**decoder.layers.*"),
        cut_tokens={"BartForConditionalGeneration": "placed"},
        order=(
            "**encoder.embed_tokens", "**encoder.embed_positions", "**encoder.layernorm_embedding", "**encoder.layers",
            "**decoder.embed_tokens", "**decoder.embed_positions", "**decoder.layernorm_embedding", "**decoder.layers",
        ),
    )
)  # fmt: skip
