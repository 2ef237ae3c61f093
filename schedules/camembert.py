"""Sharding rules for CamemBERT: those of RoBERTa, since both models have the same modules."""

from slapo_zoo.zoo.table import extend, register

CAMEMBERT = register(
    extend(
        "roberta",
        model_type="camembert",
        order=("roberta",),  # its heads are defined before it
        source="transformers 5.23.0, models/camembert/modeling_camembert.py",
    )
)
