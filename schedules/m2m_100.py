"""Sharding rules for M2M-100 and NLLB: those of mBART, but positions are computed sines, not weights."""

from slapo_zoo.zoo.rules import vocab_head
from slapo_zoo.zoo.table import extend, register

M2M_100 = register(
    extend(
        "mbart",
        model_type="m2m_100",
        source="transformers 5.23.0, models/m2m_100/modeling_m2m_100.py",
        without=("**.layernorm_embedding",),
        heads=(("lm_head", vocab_head),),  # [ceil(V/n), D], tied to shared
    )
)
