"""Sharding rules for DistilBERT. Weights are [out, in]; n is the number of tp ranks.

In shapes: D hidden, F ffn, V vocabulary, P positions. A head is never split; ranks may have unequal numbers of heads.
"""

from slapo_zoo.zoo.rules import attention, column, enter, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

ATTENTION, FFN = "transformer.layer.*.attention", "transformer.layer.*.ffn"

DISTILBERT = register(
    Table(
        model_type="distilbert",
        source="transformers 5.23.0, models/distilbert/modeling_distilbert.py",
        dims={"num_heads": "n_heads", "head_dim": "dim // n_heads"},
        body=(
            # module                                rule                   per rank
            ("embeddings.word_embeddings",          vocab),                # [ceil(V/n), D], y summed over tp
            ("embeddings.position_embeddings",      whole),                # [P, D]
            ("embeddings.LayerNorm",                whole),                # [D]
            (ATTENTION,                             enter),                # dx summed over tp
            (ATTENTION,                             attention("num_heads", ("n_heads", ""), ("dim", "head_dim"))),
            (f"{ATTENTION}.q_lin",                  column(0, "head_dim")),  # [D/n, D]
            (f"{ATTENTION}.k_lin",                  column(0, "head_dim")),  # [D/n, D]
            (f"{ATTENTION}.v_lin",                  column(0, "head_dim")),  # [D/n, D]
            (f"{ATTENTION}.out_lin",                row(1, "head_dim")),   # [D, D/n], y summed over tp
            ("transformer.layer.*.sa_layer_norm",   whole),                # [D]
            (FFN,                                   enter),                # dx summed over tp
            (f"{FFN}.lin1",                         column(0)),            # [F/n, D]
            (f"{FFN}.lin2",                         row(1)),               # [D, F/n], y summed over tp
            ("transformer.layer.*.output_layer_norm", whole),              # [D]
        ),
        heads=(
            ("vocab_transform",                     whole),                # [D, D]
            ("vocab_layer_norm",                    whole),                # [D]
            ("vocab_projector",                     vocab_head),           # [ceil(V/n), D], tied to word_embeddings
        ),
        blocks=("transformer.layer.*",),
    )
)
