"""Sharding rules for ModernBERT. Weights are [out, in]; n is the number of tp ranks.

In shapes: D hidden, F ffn, V vocabulary. A head is never split; ranks may have unequal numbers of heads. q, k and v are
in one linear, and so are the two halves of the gated feed-forward.
"""

from slapo_zoo.zoo.rules import attention, column, dropout_on, enter, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

MODERNBERT = register(
    Table(
        model_type="modernbert",
        source="transformers 5.23.0, models/modernbert/modeling_modernbert.py",
        dims={
            "num_heads": "num_attention_heads",
            "head_dim": "hidden_size // num_attention_heads",
            "width": "hidden_size",
            "ffn": "intermediate_size",
        },
        body=(
            # module                    rule                                                        per rank
            ("embeddings.tok_embeddings", vocab),                                                 # [ceil(V/n), D], y summed over tp
            ("embeddings.norm",         whole),                                                   # [D]
            ("layers.*.attn_norm",      whole),                                                   # [D]; none in the first block
            ("layers.*.attn",           enter),                                                   # dx summed over tp
            ("layers.*.attn",           attention("num_heads")),
            ("layers.*.attn.Wqkv",      column(0, "head_dim", groups=("width", "width", "width"))),  # [3 D/n, D]
            ("layers.*.attn.Wo",        row(1, "head_dim")),                                      # [D, D/n], y summed over tp
            ("layers.*.mlp_norm",       whole),                                                   # [D]
            ("layers.*.mlp",            enter),                                                   # dx summed over tp
            ("layers.*.mlp.Wi",         column(0, groups=("ffn", "ffn"))),                        # [2 F/n, D]
            ("layers.*.mlp.drop",       dropout_on(-1, "ffn")),                                   # activation [B, S, F/n]
            ("layers.*.mlp.Wo",         row(1)),                                                  # [D, F/n], y summed over tp
            ("final_norm",              whole),                                                   # [D]
        ),
        heads=(
            ("head.dense",              whole),                                                   # [D, D]
            ("head.norm",               whole),                                                   # [D]
            ("decoder",                 vocab_head),                                              # [ceil(V/n), D], tied
        ),
        blocks=("layers.*",),
        cut_tokens={"ModernBertForMaskedLM": "counted"},
    )
)  # fmt: skip
