"""Sharding rules for Phi-3 and Phi-4: those of Llama, with q|k|v in one linear and gate|up in another.

In shapes: D hidden, Q = heads * head_dim, K = kv_heads * head_dim, F ffn; n is the number of tp ranks.
Query heads stay with their KV head, and KV heads are not replicated: tp is at most the number of KV heads.
"""

from slapo_zoo.zoo.rules import attention, column, enter, row, sizes
from slapo_zoo.zoo.table import extend, register

PHI3 = register(
    extend(
        "llama",
        model_type="phi3",
        source="transformers 5.23.0, models/phi3/modeling_phi3.py",
        dims={
            "num_heads": "num_attention_heads",
            "per_kv": "num_attention_heads // num_key_value_heads",
            "head_dim": lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "q_dim": "num_attention_heads * head_dim",
            "kv_dim": "num_key_value_heads * head_dim",
            "ffn": "intermediate_size",
        },
        without=(
            "layers.*.self_attn", "layers.*.self_attn.q_proj", "layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj",
            "layers.*.self_attn.o_proj", "layers.*.mlp", "layers.*.mlp.gate_proj", "layers.*.mlp.up_proj", "layers.*.mlp.down_proj",
        ),
        body=(
            # module                         rule                                        per rank
            ("layers.*.self_attn",           enter),                                   # dx summed over tp
            ("layers.*.self_attn",           attention("num_heads", together="per_kv")),
            ("layers.*.self_attn",           sizes(("num_key_value_heads", ""))),
            ("layers.*.self_attn",           sizes(("config.num_attention_heads", ""), together="per_kv")),
            ("layers.*.self_attn.qkv_proj",  column(0, "head_dim", groups=("q_dim", "kv_dim", "kv_dim"), together="per_kv")),  # [(Q + 2 K)/n, D]
            ("layers.*.self_attn.o_proj",    row(1, "head_dim", together="per_kv")),   # [D, Q/n], y summed over tp
            ("layers.*.mlp",                 enter),                                   # dx summed over tp
            ("layers.*.mlp.gate_up_proj",    column(0, groups=("ffn", "ffn"))),        # [2 F/n, D]
            ("layers.*.mlp.down_proj",       row(1)),                                  # [D, F/n], y summed over tp
        ),
    )
)  # fmt: skip
