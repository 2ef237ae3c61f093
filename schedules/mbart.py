"""Sharding rules for mBART: those of BART, and one for the norm that ends each stack; pre-norm layers."""

from slapo_zoo.zoo.rules import whole
from slapo_zoo.zoo.table import extend, register

MBART = register(
    extend(
        "bart",
        model_type="mbart",
        source="transformers 5.23.0, models/mbart/modeling_mbart.py",
        body=(("**coder.layer_norm", whole),),  # [D]
    )
)
