"""Sharding rules for GPT-2. Conv1D stores weights as [in, out]; n is the number of tp ranks.

In shapes: D hidden, F ffn, V vocabulary, P positions. A head is never split; ranks may have unequal numbers of heads.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.zoo.rules import attention, column, enter, enter_once, row, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

GPT2 = register(
    Table(
        model_type="gpt2",
        source="transformers 5.23.0, models/gpt2/modeling_gpt2.py",
        dims={"num_heads": "n_head", "head_dim": "n_embd // n_head", "hidden": "n_embd"},
        body=(
            # module               rule                                                      per rank
            ("wte",                vocab),                                                 # [ceil(V/n), D], y summed over tp
            ("wpe",                whole),                                                 # [P, D]
            ("h.*.ln_1",           whole),                                                 # [D]
            ("h.*.attn",           enter),                                                 # dx summed over tp
            ("h.*.attn",           attention("num_heads", ("num_heads", ""), ("split_size", "head_dim"), ("embed_dim", "head_dim"))),
            ("h.*.attn.c_attn",    column(1, "head_dim", ("hidden", "hidden", "hidden"))), # [D, 3 * D/n], q|k|v each by heads
            ("h.*.attn.c_proj",    row(0, "head_dim")),                                    # [D/n, D], y summed over tp
            ("h.*.ln_cross_attn",  whole),                                                 # [D]
            ("h.*.crossattention", enter),                                                 # dx summed over tp
            ("h.*.crossattention", attention("num_heads", ("num_heads", ""), ("split_size", "head_dim"), ("embed_dim", "head_dim"))),
            ("h.*.crossattention.q_attn", column(1, "head_dim")),                          # [D, D/n]
            ("h.*.crossattention.c_attn", enter_once),                                         # d(encoder states) summed over tp
            ("h.*.crossattention.c_attn", column(1, "head_dim", ("hidden", "hidden"))),    # [D, 2 * D/n], k|v
            ("h.*.crossattention.c_proj", row(0, "head_dim")),                             # [D/n, D], y summed over tp
            ("h.*.ln_2",           whole),                                                 # [D]
            ("h.*.mlp",            enter),                                                 # dx summed over tp
            ("h.*.mlp.c_fc",       column(1)),                                             # [D, F/n]
            ("h.*.mlp.c_proj",     row(0)),                                                # [F/n, D], y summed over tp
            ("ln_f",               whole),                                                 # [D]
        ),
        heads=(
            ("lm_head",            vocab_head),                                            # [ceil(V/n), D], tied to wte
        ),
        blocks=("h.*",),
        cut_tokens={"GPT2LMHeadModel": "counted"},
        tunable=tunable(attention=("sdpa", "eager", "flash", "xformers")),
    )
)
