"""Schedule table of CamemBERT: that of RoBERTa."""

from slapo_zoo.zoo.table import extend, register

CAMEMBERT = register(
    extend(
        "roberta",
        model_type="camembert",
        order=("roberta",),  # its heads are defined before it
        source="transformers 5.23.0, models/camembert/modeling_camembert.py",
    )
)
