"""Sharding rules for ViT. Weights are [out, in]; n is the number of tp ranks.

In shapes: D hidden, F ffn, C channels, P patch size, N patches.
"""

from slapo_zoo.zoo.rules import attention, column, enter, row, whole
from slapo_zoo.zoo.table import Table, image_tokens, register

VIT = register(
    Table(
        model_type="vit",
        source="transformers 5.23.0, models/vit/modeling_vit.py",
        dims={"num_heads": "num_attention_heads", "head_dim": "hidden_size // num_attention_heads"},
        body=(
            # module                        rule                       per rank
            ("embeddings",                  whole),                  # cls_token [1, 1, D], position_embeddings [1, N + 1, D]
            ("embeddings.patch_embeddings.projection", whole),       # [D, C, P, P]
            ("layers.*.layernorm_before",   whole),                  # [D]
            ("layers.*.attention",          enter),                  # dx summed over tp
            ("layers.*.attention",          attention("num_heads", ("num_attention_heads", ""))),
            ("layers.*.attention.q_proj",   column(0, "head_dim")),  # [D/n, D]
            ("layers.*.attention.k_proj",   column(0, "head_dim")),  # [D/n, D]
            ("layers.*.attention.v_proj",   column(0, "head_dim")),  # [D/n, D]
            ("layers.*.attention.o_proj",   row(1, "head_dim")),     # [D, D/n], y summed over tp
            ("layers.*.layernorm_after",    whole),                  # [D]
            ("layers.*.mlp",                enter),                  # dx summed over tp
            ("layers.*.mlp.fc1",            column(0)),              # [F/n, D]
            ("layers.*.mlp.fc2",            row(1)),                 # [D, F/n], y summed over tp
            ("layernorm",                   whole),                  # [D]
            ("pooler.dense",                whole),                  # [D, D]
        ),
        heads=(),
        blocks=("layers.*",),
        num_tokens=image_tokens,
        renames=(
            # in files                      in the model
            ("encoder.layer.",              "layers."),
            ("attention.attention.query",   "attention.q_proj"),
            ("attention.attention.key",     "attention.k_proj"),
            ("attention.attention.value",   "attention.v_proj"),
            ("attention.output.dense",      "attention.o_proj"),
            ("intermediate.dense",          "mlp.fc1"),
            (".output.dense",               ".mlp.fc2"),
        ),
    )
)
