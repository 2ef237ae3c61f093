"""Sharding rules for Qwen2: those of Llama. The biases of q, k and v are sharded like their weights."""

from slapo_zoo.zoo.table import extend, register

QWEN2 = register(
    extend("llama", model_type="qwen2", source="transformers 5.23.0, models/qwen2/modeling_qwen2.py")
)
