"""Schedule table of Gemma: the rows of Llama's table.

Gemma's norms multiply by 1 + weight, and its head_dim is no fraction of its width; no row depends on either.
"""

from slapo_zoo.zoo.table import extend, register

GEMMA = register(
    extend("llama", model_type="gemma", source="transformers 5.23.0, models/gemma/modeling_gemma.py")
)
