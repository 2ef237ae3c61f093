"""Schedule table of mBART: that of BART, with pre-norm layers and a norm at the end of each stack."""

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
