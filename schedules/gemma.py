"""Sharding rules for Gemma: those of Llama.

Gemma's norms multiply by 1 + weight, and its head_dim is no fraction of its hidden size; no rule depends on either.
"""

from slapo_zoo.zoo.table import extend, register

GEMMA = register(
    extend("llama", model_type="gemma", source="transformers 5.23.0, models/gemma/modeling_gemma.py")
)
