"""Sharding rules for DeBERTa-v2 and -v3. Weights are [out, in]; n is the number of tp ranks.

In shapes: D hidden, E embedding, F ffn, V vocabulary, P positions, R relative distances. A head is never split; ranks
may have unequal numbers of heads. Scores also depend on embedded distances, which every rank holds unsharded.
"""

from slapo_zoo.zoo.rules import (
    column, dropout_of_all, dropout_on, enter, enter_whole, row, sizes, vocab, vocab_head, whole,
)  # fmt: skip
from slapo_zoo.zoo.table import Table, register, tunable

DEBERTA_V2 = register(
    Table(
        model_type="deberta-v2",
        source="transformers 5.23.0, models/deberta_v2/modeling_deberta_v2.py",
        dims={"num_heads": "num_attention_heads", "head_dim": "hidden_size // num_attention_heads"},
        body=(
            # module                                         rule                 per rank
            ("embeddings.word_embeddings",                   vocab),            # [ceil(V/n), E], y summed over tp
            ("embeddings.position_embeddings",               whole),            # [P, E]
            ("embeddings.token_type_embeddings",             whole),            # [2, E]
            ("embeddings.embed_proj",                        whole),            # [D, E]
            ("embeddings.LayerNorm",                         whole),            # [D]
            ("encoder.rel_embeddings",                       whole),            # [2 R, D]
            ("encoder.LayerNorm",                            whole),            # [D], of the distances
            ("encoder.conv.conv",                            whole),            # [D, D, 3]
            ("encoder.conv.LayerNorm",                       whole),            # [D]
            ("encoder.layer.*.attention.self",               enter),            # dx summed over tp
            ("encoder.layer.*.attention.self",               sizes(("num_attention_heads", ""))),
            ("encoder.layer.*.attention.self.pos_dropout",   enter_whole),      # d(distances) summed over tp
            ("encoder.layer.*.attention.self.pos_dropout",   dropout_of_all),   # [2 R, D], the same mask for all rows
            ("encoder.layer.*.attention.self.query_proj",    column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.key_proj",      column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.value_proj",    column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.pos_key_proj",  column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.pos_query_proj", column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.dropout",       dropout_on(1, "num_heads")),  # probabilities [B, H/n, S, S]
            ("encoder.layer.*.attention.output.dense",       row(1, "head_dim")),     # [D, D/n], y summed over tp
            ("encoder.layer.*.attention.output.LayerNorm",   whole),            # [D]
            ("encoder.layer.*.intermediate",                 enter),            # dx summed over tp
            ("encoder.layer.*.intermediate.dense",           column(0)),        # [F/n, D]
            ("encoder.layer.*.output.dense",                 row(1)),           # [D, F/n], y summed over tp
            ("encoder.layer.*.output.LayerNorm",             whole),            # [D]
        ),
        heads=(
            ("cls.predictions.transform.dense",              whole),            # [E, D]
            ("cls.predictions.transform.LayerNorm",          whole),            # [E]
            ("cls.predictions.decoder",                      vocab_head),       # [ceil(V/n), E], tied to word_embeddings
            ("pooler.dense",                                 whole),            # [D, D]
        ),
        blocks=("encoder.layer.*",),
        order=(
            "**embeddings", "**encoder", "**encoder.rel_embeddings", "**encoder.LayerNorm", "**encoder.conv", "**encoder.layer",
        ),
        tunable=tunable(attention=("eager",)),
        seam=False,
        defaults={  # of DeBERTa-v3-base; without one of these a config has no relative attention
            "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "pooler_hidden_size": 768, "vocab_size": 128100,
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
            "position_buckets": 256, "position_biased_input": False, "type_vocab_size": 0,
        },
        needs=(("legacy", True), ("conv_kernel_size", 0, "sp")),  # the other head reads the weight of the embedding
    )
)  # fmt: skip
