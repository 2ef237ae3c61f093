"""Sharding rules for GPT-J: attention and feed-forward in parallel after one norm; rotary positions.

In shapes: D hidden, H heads, F ffn, V vocabulary; n is the number of tp ranks. Weights are [out, in].
"""

from slapo_zoo.zoo.rules import attention, column, dropout_on, enter, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

GPTJ = register(
    Table(
        model_type="gptj",
        source="transformers 5.23.0, models/gptj/modeling_gptj.py",
        dims={"num_heads": "n_head", "head_dim": "n_embd // n_head"},
        body=(
            # module                  rule                           per rank
            ("wte",                   vocab),                      # [ceil(V/n), D], y summed over tp
            ("h.*.ln_1",              whole),                      # [D], read by both halves
            ("h.*.attn",              enter),                      # dx summed over tp
            ("h.*.attn",              attention("num_heads", ("num_attention_heads", ""), ("embed_dim", "head_dim"))),
            ("h.*.attn.q_proj",       column(0, "head_dim")),      # [D/n, D]
            ("h.*.attn.k_proj",       column(0, "head_dim")),      # [D/n, D]
            ("h.*.attn.v_proj",       column(0, "head_dim")),      # [D/n, D]
            ("h.*.attn.attn_dropout", dropout_on(1, "num_heads")),  # [B, H/n, S, S], before 5.24
            ("h.*.attn.out_proj",     row(1, "head_dim")),         # [D, D/n], y summed over tp
            ("h.*.mlp",               enter),                      # dx summed over tp
            ("h.*.mlp.fc_in",         column(0)),                  # [F/n, D]
            ("h.*.mlp.fc_out",        row(1)),                     # [D, F/n], y summed over tp
            ("ln_f",                  whole),                      # [D]
        ),
        heads=(
            ("lm_head",               vocab_head),                 # [ceil(V/n), D], with a bias
        ),
        blocks=("h.*",),
        seam=None,
    )
)
