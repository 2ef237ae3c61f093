"""Mistral: Llama's blocks; its sliding window lies in the mask, which every rank has whole."""

from slapo_zoo.zoo.table import extend, register

MISTRAL = register(
    extend("llama", model_type="mistral", source="transformers 5.23.0, models/mistral/modeling_mistral.py")
)
