"""Sharding rules for Gemma 3 (text models): those of Gemma 2, and two for norms of each head's q and k."""

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
