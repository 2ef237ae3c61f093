"""Sharding rules for Mamba (no attention): a mixer is sharded by channels, as convolution and scan act per channel.

In shapes: D hidden, I = expand * D channels, R time step rank, N states, K kernel, V vocabulary; n is the tp size.
x_proj alone reads all channels: its output is all-reduced, and so is that output's gradient, since each rank uses the
output for its own channels only.
"""

from slapo_zoo.zoo.options import tunable
from slapo_zoo.language.primitives import Unfused
from slapo_zoo.zoo.rules import bare, column, enter, row, row_inside, vocab, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

MAMBA = register(
    Table(
        model_type="mamba",
        source="transformers 5.23.0, models/mamba/modeling_mamba.py",
        dims={"channels": "intermediate_size"},
        body=(
            # module                   rule                                           per rank
            ("embeddings",             vocab),                                      # [ceil(V/n), D], y summed over tp
            ("layers.*.norm",          whole),                                      # [D]
            ("layers.*.mixer",         enter),                                      # dx summed over tp
            ("layers.*.mixer",         (Unfused(),)),                               # one kernel would skip the sum of x_proj
            ("layers.*.mixer",         bare("A_log", "D")),                         # [I/n, N], [I/n]
            ("layers.*.mixer.in_proj", column(0, groups=("channels", "channels"))), # [2 * I/n, D], x|gate
            ("layers.*.mixer.conv1d",  column(0)),                                  # [I/n, 1, K]
            ("layers.*.mixer.x_proj",  row_inside(1)),                              # [R + 2 N, I/n], y and dy summed over tp
            ("layers.*.mixer.dt_proj", column(0)),                                  # [I/n, R]
            ("layers.*.mixer.out_proj", row(1)),                                    # [D, I/n], y summed over tp
            ("norm_f",                 whole),                                      # [D]
        ),
        heads=(
            ("lm_head",                vocab_head),                                 # [ceil(V/n), D], tied to embeddings
        ),
        blocks=("layers.*",),
        tunable=tunable(attention=()),
        seam=False,
    )
)
