"""Sharding rules for XLM-RoBERTa: those of RoBERTa, since both models have the same modules."""

from slapo_zoo.zoo.table import extend, register

XLM_ROBERTA = register(
    extend(
        "roberta",
        model_type="xlm-roberta",
        order=("roberta",),  # its heads are defined before it
        source="transformers 5.23.0, models/xlm_roberta/modeling_xlm_roberta.py",
    )
)
