"""Sharding rules for BERT. Weights are [out, in]; n is the number of tp ranks.

In shapes: D hidden, F ffn, V vocabulary, P positions. A head is never split; ranks may have unequal numbers of heads.
"""

from slapo_zoo.zoo.rules import attention, column, enter, enter_once, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

BERT = register(
    Table(
        model_type="bert",
        source="transformers 5.23.0, models/bert/modeling_bert.py",
        dims={"num_heads": "num_attention_heads", "head_dim": "hidden_size // num_attention_heads"},
        body=(
            # module                                         rule                 per rank
            ("embeddings.word_embeddings",                   vocab),            # [ceil(V/n), D], y summed over tp
            ("embeddings.position_embeddings",               whole),            # [P, D]
            ("embeddings.token_type_embeddings",             whole),            # [2, D]
            ("embeddings.LayerNorm",                         whole),            # [D]
            ("encoder.layer.*.attention.self",               enter),            # dx summed over tp
            ("encoder.layer.*.attention.self",               attention("num_heads", ("num_attention_heads", ""), ("all_head_size", "head_dim"))),
            ("encoder.layer.*.attention.self.query",         column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.key",           column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.self.value",         column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.attention.output.dense",       row(1, "head_dim")),     # [D, D/n], y summed over tp
            ("encoder.layer.*.attention.output.LayerNorm",   whole),            # [D]
            ("encoder.layer.*.crossattention.self",          enter),            # dx summed over tp
            ("encoder.layer.*.crossattention.self",          attention("num_heads", ("num_attention_heads", ""), ("all_head_size", "head_dim"))),
            ("encoder.layer.*.crossattention.self.key",      enter_once),       # d(encoder states) summed over tp
            ("encoder.layer.*.crossattention.self.value",    enter_once),
            ("encoder.layer.*.crossattention.self.query",    column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.crossattention.self.key",      column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.crossattention.self.value",    column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.crossattention.output.dense",  row(1, "head_dim")),     # [D, D/n], y summed over tp
            ("encoder.layer.*.crossattention.output.LayerNorm", whole),         # [D]
            ("encoder.layer.*.intermediate",                 enter),            # dx summed over tp
            ("encoder.layer.*.intermediate.dense",           column(0)),        # [F/n, D]
            ("encoder.layer.*.output.dense",                 row(1)),           # [D, F/n], y summed over tp
            ("encoder.layer.*.output.LayerNorm",             whole),            # [D]
            ("pooler.dense",                                 whole),            # [D, D]
        ),
        heads=(
            ("cls.predictions.transform.dense",              whole),            # [D, D]
            ("cls.predictions.transform.LayerNorm",          whole),            # [D]
            ("cls.predictions.decoder",                      vocab_head),       # [ceil(V/n), D], tied to word_embeddings
        ),
        blocks=("encoder.layer.*",),
        cut_tokens={"BertForMaskedLM": "counted", "BertForTokenClassification": "counted"},
    )
)
