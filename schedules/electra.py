"""Sharding rules for ELECTRA, generator and discriminator: BERT's blocks after a narrower embedding.

In shapes: D hidden, E embedding, V vocabulary; n is the number of tp ranks.
"""

from slapo_zoo.zoo.rules import vocab_head, whole
from slapo_zoo.zoo.table import extend, register

ELECTRA = register(
    extend(
        "bert",
        model_type="electra",
        source="transformers 5.23.0, models/electra/modeling_electra.py",
        without=("pooler.dense",),
        body=(
            # module                          rule           per rank
            ("embeddings_project",            whole),      # [D, E], absent where E = D
        ),
        heads=(
            ("generator_predictions.dense",     whole),      # [E, D]
            ("generator_predictions.LayerNorm", whole),      # [E]
            ("generator_lm_head",               vocab_head), # [ceil(V/n), E], tied to word_embeddings
        ),
    )
)
