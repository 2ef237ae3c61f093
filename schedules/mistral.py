"""Sharding rules for Mistral: those of Llama. The sliding window is in the mask, which is unsharded."""

from slapo_zoo.zoo.table import extend, register

MISTRAL = register(
    extend(
        "llama",
        model_type="mistral",
        source="transformers 5.23.0, models/mistral/modeling_mistral.py",
        cut_tokens={"MistralForCausalLM": "counted"},
    )
)
