"""Sharding rules for CLIP: an image and a text tower, whose outputs are compared over the whole batch.

In shapes: D hidden, F ffn (both by tower), V vocabulary, P positions or patch size, C channels, E projection;
n is the number of tp ranks.
"""

from slapo_zoo.zoo.rules import attention, column, enter, row, vocab, whole
from slapo_zoo.zoo.table import Table, image_tokens, register


def tower(name: str) -> tuple:
    """Return (pattern of module paths, sharding rule) pairs for the blocks of CLIP's tower `name`, "vision" or "text"."""
    block, heads, head_dim = f"{name}_model.encoder.layers.*", f"{name}_heads", f"{name}_head_dim"
    return (
        # module                            rule                   per rank
        (f"{block}.layer_norm1",            whole),              # [D]
        (f"{block}.self_attn",              enter),              # dx summed over tp
        (f"{block}.self_attn",              attention(heads)),
        (f"{block}.self_attn.q_proj",       column(0, head_dim)),  # [D/n, D]
        (f"{block}.self_attn.k_proj",       column(0, head_dim)),  # [D/n, D]
        (f"{block}.self_attn.v_proj",       column(0, head_dim)),  # [D/n, D]
        (f"{block}.self_attn.out_proj",     row(1, head_dim)),   # [D, D/n], y summed over tp
        (f"{block}.layer_norm2",            whole),              # [D]
        (f"{block}.mlp",                    enter),              # dx summed over tp
        (f"{block}.mlp.fc1",                column(0)),          # [F/n, D]
        (f"{block}.mlp.fc2",                row(1)),             # [D, F/n], y summed over tp
    )  # fmt: skip


CLIP = register(
    Table(
        model_type="clip",
        source="transformers 5.23.0, models/clip/modeling_clip.py",
        dims={
            "text_heads": lambda config: config.text_config.num_attention_heads,
            "text_head_dim": lambda config: config.text_config.hidden_size // config.text_config.num_attention_heads,
            "vision_heads": lambda config: config.vision_config.num_attention_heads,
            "vision_head_dim": lambda config: config.vision_config.hidden_size // config.vision_config.num_attention_heads,
        },
        body=(
            # module                                      rule      per rank
            ("",                                          whole),  # logit_scale []
            ("vision_model.embeddings",                   whole),  # class_embedding [D]
            ("vision_model.embeddings.*_embedding",       whole),  # [D, C, P, P], [P, D]
            ("vision_model.pre_layrnorm",                 whole),  # [D]
            *tower("vision"),
            ("vision_model.post_layernorm",               whole),  # [D]
            ("text_model.embeddings.token_embedding",     vocab),  # [ceil(V/n), D], y summed over tp
            ("text_model.embeddings.position_embedding",  whole),  # [P, D]
            *tower("text"),
            ("text_model.final_layer_norm",               whole),  # [D]
            ("*_projection",                              whole),  # [E, D]
        ),
        heads=(),
        blocks=("vision_model.encoder.layers.*", "text_model.encoder.layers.*"),
        order=("vision_model", "visual_projection", "text_model", "text_projection"),
        num_tokens=lambda config, *sides: image_tokens(config.vision_config, *sides),
        undivided=("CLIPModel",),  # each image is compared with all texts of the batch
    )
)  # fmt: skip
