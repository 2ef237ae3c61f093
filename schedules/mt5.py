"""Sharding rules for mT5: those of T5. mT5 is T5 v1.1: gated feed-forward, untied embeddings."""

from slapo_zoo.zoo.table import extend, register

MT5 = register(
    extend("t5", model_type="mt5", source="transformers 5.23.0, models/mt5/modeling_mt5.py")
)
