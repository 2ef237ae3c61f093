"""Sharding rules for GPT-Neo: windowed attention in every other block, outside transformers' AttentionInterface.

In shapes: D hidden, F ffn, V vocabulary, P positions; n is the number of tp ranks.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.zoo.rules import column, dropout_on, enter, row, sizes, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

ATTENTION = "h.*.attn.attention"

GPT_NEO = register(
    Table(
        model_type="gpt_neo",
        source="transformers 5.23.0, models/gpt_neo/modeling_gpt_neo.py",
        dims={"num_heads": "num_heads", "head_dim": "hidden_size // num_heads"},
        body=(
            # module                     rule                           per rank
            ("wte",                      vocab),                      # [ceil(V/n), D], y summed over tp
            ("wpe",                      whole),                      # [P, D]
            ("h.*.ln_1",                 whole),                      # [D]
            (ATTENTION,                  enter),                      # dx summed over tp
            (ATTENTION,                  sizes(("num_heads", ""), ("embed_dim", "head_dim"))),
            (f"{ATTENTION}.q_proj",      column(0, "head_dim")),      # [D/n, D]
            (f"{ATTENTION}.k_proj",      column(0, "head_dim")),      # [D/n, D]
            (f"{ATTENTION}.v_proj",      column(0, "head_dim")),      # [D/n, D]
            (f"{ATTENTION}.attn_dropout", dropout_on(1, "num_heads")),  # probabilities [B, H/n, S, S]
            (f"{ATTENTION}.out_proj",    row(1, "head_dim")),         # [D, D/n], y summed over tp
            ("h.*.ln_2",                 whole),                      # [D]
            ("h.*.mlp",                  enter),                      # dx summed over tp
            ("h.*.mlp.c_fc",             column(0)),                  # [F/n, D]
            ("h.*.mlp.c_proj",           row(1)),                     # [D, F/n], y summed over tp
            ("ln_f",                     whole),                      # [D]
        ),
        heads=(
            ("lm_head",                  vocab_head),                 # [ceil(V/n), D], tied to wte
        ),
        blocks=("h.*",),
        tunable=tunable(attention=("eager",)),
        seam=False,
        cut_tokens={"GPTNeoForCausalLM": "counted"},
    )
)
