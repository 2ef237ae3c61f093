"""Sharding rules for OPT: the block itself calls fc1 and fc2 (no MLP module), and its residual dropout is F.dropout.

In shapes: D hidden, W word embedding, F ffn, V vocabulary, P positions; n is the number of tp ranks.
"""

from slapo_zoo.zoo.rules import attention, column, dropout_tokens, enter, enter_flat, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

OPT = register(
    Table(
        model_type="opt",
        source="transformers 5.23.0, models/opt/modeling_opt.py",
        dims={"num_heads": "num_attention_heads", "head_dim": "hidden_size // num_attention_heads"},
        body=(
            # module                                  rule                       per rank
            ("decoder.embed_tokens",                  vocab),                  # [ceil(V/n), W], y summed over tp
            ("decoder.embed_positions",               whole),                  # [P, D]
            ("decoder.project_in",                    whole),                  # [D, W], only where W != D
            ("decoder.project_out",                   whole),                  # [W, D]
            ("decoder.layers.*",                      dropout_tokens),               # its F.dropout draws as a Dropout does
            ("decoder.layers.*.self_attn_layer_norm", whole),                  # [D]
            ("decoder.layers.*.self_attn",            enter),                  # dx summed over tp
            ("decoder.layers.*.self_attn",            attention("num_heads", ("num_heads", ""), ("embed_dim", "head_dim"))),
            ("decoder.layers.*.self_attn.q_proj",     column(0, "head_dim")),  # [D/n, D]
            ("decoder.layers.*.self_attn.k_proj",     column(0, "head_dim")),  # [D/n, D]
            ("decoder.layers.*.self_attn.v_proj",     column(0, "head_dim")),  # [D/n, D]
            ("decoder.layers.*.self_attn.out_proj",   row(1, "head_dim")),     # [D, D/n], y summed over tp
            ("decoder.layers.*.final_layer_norm",     whole),                  # [D]
            ("decoder.layers.*.fc1",                  enter_flat),                 # dx summed over tp
            ("decoder.layers.*.fc1",                  column(0)),              # [F/n, D]
            ("decoder.layers.*.fc2",                  row(1, tokens=0)),                # [D, F/n], y summed over tp
            ("decoder.final_layer_norm",              whole),                  # [D]
        ),
        heads=(
            ("lm_head",                               vocab_head),             # [ceil(V/n), W], tied to embed_tokens
        ),
        blocks=("decoder.layers.*",),
        cut_tokens={"OPTForCausalLM": "counted by mask"},
        after_blocks=("decoder.final_layer_norm", "decoder.project_out"),
    )
)
