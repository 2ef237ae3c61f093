"""Mixtral: Mistral's attention; the ranks divide the experts, and every rank routes all tokens.

D hidden, Q = heads * head_dim, K = kv_heads * head_dim, E experts, F ffn of an expert, V vocabulary; n is the
size of mesh dim tp. Files hold the experts one by one, as w1 (gate), w2 (down) and w3 (up).
"""

from slapo_zoo.weights.keys import Pieces
from slapo_zoo.rules import attention, column, enter, experts, kv_groups, row, vocab, vocab_head, whole
from slapo_zoo.zoo import Table, register

MIXTRAL = register(
    Table(
        model_type="mixtral",
        source="transformers 5.23.0, models/mixtral/modeling_mixtral.py",
        dims={
            "num_heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "per_kv": lambda config: config.num_attention_heads // config.num_key_value_heads,
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
            ("layers.*.mlp.gate",                   whole),                                   # [E, D]
            ("layers.*.mlp.experts",                experts("gate_up_proj", "down_proj")),    # [E/n, 2 F, D], [E/n, D, F]
            ("norm",                                whole),                                   # [D]
        ),
        heads=(
            ("lm_head",                             vocab_head),                              # [ceil(V/n), D], may be tied
        ),
        blocks=("layers.*",),
        all_tokens=("layers.*.mlp",),  # the router and the experts
        whole_batch=("output_router_logits",),
        renames=((".block_sparse_moe.", ".mlp."),),
        pieces=(
            Pieces(".experts.gate_up_proj", (".experts.{}.w1.weight", ".experts.{}.w3.weight")),
            Pieces(".experts.down_proj", (".experts.{}.w2.weight",)),
        ),
    )
)
