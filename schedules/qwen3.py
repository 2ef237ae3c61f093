"""Sharding rules for Qwen3: those of Llama, and two for norms of q and k, whose weights all heads share."""

from slapo_zoo.zoo.rules import whole_on_heads
from slapo_zoo.zoo.table import extend, register

QWEN3 = register(
    extend(
        "llama",
        model_type="qwen3",
        source="transformers 5.23.0, models/qwen3/modeling_qwen3.py",
        body=(
            # module                     rule               per rank
            ("layers.*.self_attn.q_norm", whole_on_heads),  # [head_dim], dw summed over tp
            ("layers.*.self_attn.k_norm", whole_on_heads),  # [head_dim], dw summed over tp
        ),
        cut_tokens={"Qwen3ForCausalLM": "counted"},
    )
)
