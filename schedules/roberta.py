"""Sharding rules for RoBERTa: those of BERT, and others for the language-model head.

In shapes: D hidden, V vocabulary; n is the number of tp ranks. Positions count from padding_idx + 1.
"""

from slapo_zoo.zoo.rules import vocab_head, whole
from slapo_zoo.zoo.table import extend, register

ROBERTA = register(
    extend(
        "bert",
        model_type="roberta",
        source="transformers 5.23.0, models/roberta/modeling_roberta.py",
        heads=(
            # module               rule           per rank
            ("lm_head.dense",      whole),      # [D, D]
            ("lm_head.layer_norm", whole),      # [D]
            ("lm_head.decoder",    vocab_head), # [ceil(V/n), D], tied to word_embeddings
        ),
        cut_tokens={"RobertaForMaskedLM": "counted real"},
    )
)
