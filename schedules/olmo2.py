"""Sharding rules for OLMo-2: those of Llama, with norms after attention and feed-forward; q and k have norms over all heads."""

from slapo_zoo.zoo.rules import norm_of_heads, whole
from slapo_zoo.zoo.table import extend, register

OLMO2 = register(
    extend(
        "llama",
        model_type="olmo2",
        source="transformers 5.23.0, models/olmo2/modeling_olmo2.py",
        without=("layers.*.input_layernorm",),
        body=(
            # module                                rule                                         per rank
            ("layers.*.self_attn.q_norm",           norm_of_heads("head_dim", together="per_kv")),  # [Q/n], squares summed over tp
            ("layers.*.self_attn.k_norm",           norm_of_heads("head_dim", kv=True)),            # [K/n], squares summed over tp
            ("layers.*.post_feedforward_layernorm", whole),                                         # [D]
        ),
    )
)  # fmt: skip
