"""Sharding rules for Llama. Weights are [out, in]; n is the number of tp ranks.

In shapes: D hidden, Q = heads * head_dim, K = kv_heads * head_dim, F ffn, V vocabulary. Query heads stay with their KV
head; with more ranks than KV heads, adjacent ranks hold the same KV head.
"""

from slapo_zoo.zoo.rules import attention, column, enter, kv_groups, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

LLAMA = register(
    Table(
        model_type="llama",
        source="transformers 5.23.0, models/llama/modeling_llama.py",
        dims={
            "num_heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "per_kv": "num_attention_heads // num_key_value_heads",
            "head_dim": lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        },
        body=(
            # module                                rule                                        per rank
            ("embed_tokens",                        vocab),                                   # [ceil(V/n), D], y summed over tp
            ("layers.*.input_layernorm",            whole),                                   # [D]
            ("layers.*.self_attn",                  enter),                                   # dx summed over tp
            ("layers.*.self_attn",                  attention("num_heads", together="per_kv")),
            ("layers.*.self_attn",                  kv_groups("num_key_value_groups", "kv_heads")),
            ("layers.*.self_attn.q_proj",           column(0, "head_dim", together="per_kv")),  # [Q/n, D]
            ("layers.*.self_attn.k_proj",           column(0, "head_dim", kv=True)),          # [K/n, D], at least one head
            ("layers.*.self_attn.v_proj",           column(0, "head_dim", kv=True)),          # [K/n, D], at least one head
            ("layers.*.self_attn.o_proj",           row(1, "head_dim", together="per_kv")),   # [D, Q/n], y summed over tp
            ("layers.*.post_attention_layernorm",   whole),                                   # [D]
            ("layers.*.mlp",                        enter),                                   # dx summed over tp
            ("layers.*.mlp.gate_proj",              column(0)),                               # [F/n, D]
            ("layers.*.mlp.up_proj",                column(0)),                               # [F/n, D]
            ("layers.*.mlp.down_proj",              row(1)),                                  # [D, F/n], y summed over tp
            ("norm",                                whole),                                   # [D]
        ),
        heads=(
            ("lm_head",                             vocab_head),                              # [ceil(V/n), D], may be tied
        ),
        blocks=("layers.*",),
        cut_tokens={"LlamaForCausalLM": "counted"},
    )
)
