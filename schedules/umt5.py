"""Sharding rules for UMT5: those of T5. UMT5 is T5 v1.1 with relative positions in every block."""

from slapo_zoo.zoo.table import extend, register

UMT5 = register(
    extend("t5", model_type="umt5", source="transformers 5.23.0, models/umt5/modeling_umt5.py")
)
