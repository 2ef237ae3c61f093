"""Schedule table of Mistral: that of Llama; the sliding window is in the mask, which every rank has unsharded."""

from slapo_zoo.zoo.table import extend, register

MISTRAL = register(
    extend(
        "llama",
        model_type="mistral",
        source="transformers 5.23.0, models/mistral/modeling_mistral.py",
        cut_tokens={"MistralForCausalLM": "counted"},
    )
)
