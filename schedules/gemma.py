"""Schedule table of Gemma: that of Llama; head_dim is independent of the width, and norms scale by 1 + w."""

from slapo_zoo.zoo.table import extend, register

GEMMA = register(
    extend("llama", model_type="gemma", source="transformers 5.23.0, models/gemma/modeling_gemma.py")
)
