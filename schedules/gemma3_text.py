"""Schedule table of Gemma 3 (text models): the rows of Gemma 2's table, and two for norms of q and k on each head."""

from slapo_zoo.zoo.rules import whole_on_heads
from slapo_zoo.zoo.table import extend, register

GEMMA3 = register(
    extend(
        "gemma2",
        model_type="gemma3_text",
        source="transformers 5.23.0, models/gemma3/modeling_gemma3.py",
        body=(
            # module                     rule               per rank
            ("layers.*.self_attn.q_norm", whole_on_heads),  # [head_dim], dw summed over tp
            ("layers.*.self_attn.k_norm", whole_on_heads),  # [head_dim], dw summed over tp
        ),
    )
)
