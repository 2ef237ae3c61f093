"""Sharding rules for Swin: attention in windows; a stage halves the sides of the patch grid and doubles the features.

In shapes: D features and H heads of a stage, F ffn, C channels, P patch size, N patches, R relative distances in
a window; n is the number of tp ranks. Windows mix tokens, so every rank needs all tokens: no sequence parallelism.
"""

from slapo_zoo.language.primitives import Shard
from slapo_zoo.zoo.rules import attention, column, dropout, enter_whole, row, whole
from slapo_zoo.zoo.table import Table, register

STAGES = range(4)  # rows of one that a model has not match nothing


def of_stage(stage: int) -> tuple:
    """Return (pattern of module paths, sharding rule) pairs for the attention of Swin's stage `stage`, an index from 0."""
    path, width = f"encoder.layers.{stage}.blocks.*.attention", f"head_dim{stage}"
    return (
        # module                            rule                    per rank
        (path,                              enter_whole),         # dx summed over tp
        (path,                              attention(f"num_heads{stage}")),
        (f"{path}.q_proj",                  column(0, width)),    # [D/n, D]
        (f"{path}.k_proj",                  column(0, width)),    # [D/n, D]
        (f"{path}.v_proj",                  column(0, width)),    # [D/n, D]
        (f"{path}.relative_position_bias",  (Shard("relative_position_bias_table", 1, uneven=True),)),  # [R, H/n]
        (f"{path}.o_proj",                  row(1, width, tokens=-1)),  # [D, D/n], y summed over tp
    )  # fmt: skip


SWIN = register(
    Table(
        model_type="swin",
        source="transformers 5.23.0, models/swin/modeling_swin.py",
        dims={f"num_heads{i}": lambda config, i=i: (*config.num_heads, 1, 1, 1)[i] for i in STAGES}
        | {f"head_dim{i}": lambda config, i=i: config.embed_dim * 2**i // (*config.num_heads, 1, 1, 1)[i] for i in STAGES},
        body=(
            # module                                   rule                per rank
            ("embeddings",                             whole),           # mask_token [1, 1, D], position_embeddings [1, N, D]
            ("embeddings.patch_embeddings.projection", whole),           # [D, C, P, P]
            ("embeddings.norm",                        whole),           # [D]
            *(one for stage in STAGES for one in of_stage(stage)),
            ("encoder.layers.*.blocks.*.layernorm_*",  whole),           # [D]
            ("encoder.layers.*.blocks.*.drop_path",        dropout),         # of whole rows
            ("encoder.layers.*.blocks.*.mlp",          enter_whole),     # dx summed over tp
            ("encoder.layers.*.blocks.*.mlp.fc1",      column(0)),       # [F/n, D]
            ("encoder.layers.*.blocks.*.mlp.fc2",      row(1, tokens=-1)),  # [D, F/n], y summed over tp
            ("encoder.layers.*.downsample.norm",       whole),           # [4 D]
            ("encoder.layers.*.downsample.reduction",  whole),           # [2 D, 4 D]
            ("layernorm",                              whole),           # [D]
        ),
        heads=(("decoder.0", whole),),                                   # [P P C, D, 1, 1]
        blocks=("encoder.layers.*.blocks.*",),
        defaults={"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},  # of Swin-B: its heads divide by 4
        renames=(  # (in files, in the model)
            ("attention.self.query", "attention.q_proj"), ("attention.self.key", "attention.k_proj"), ("attention.self.value", "attention.v_proj"),
            ("attention.self.relative", "attention.relative_position_bias.relative"), ("attention.output.dense", "attention.o_proj"),
            ("intermediate.dense", "mlp.fc1"), (".output.dense", ".mlp.fc2"),
        ),
    )
)  # fmt: skip
