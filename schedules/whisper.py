"""Sharding rules for Whisper: those of BART, for an encoder of audio features after two convolutions; pre-norm layers.

In shapes: D hidden, M mel bins, V vocabulary; n is the number of tp ranks.
"""

from slapo_zoo.zoo.rules import vocab, vocab_head, whole
from slapo_zoo.zoo.table import extend, register

WHISPER = register(
    extend(
        "bart",
        model_type="whisper",
        source="transformers 5.23.0, models/whisper/modeling_whisper.py",
        without=("**shared", "**.embed_tokens", "**.layernorm_embedding"),
        body=(
            # module                    rule       per rank
            ("**encoder.conv1",         whole),  # [D, M, 3]
            ("**encoder.conv2",         whole),  # [D, D, 3]
            ("**decoder.embed_tokens",  vocab),  # [ceil(V/n), D], y summed over tp
            ("**.layer_norm",           whole),  # [D]
        ),
        heads=(("proj_out", vocab_head),),       # [ceil(V/n), D], tied to embed_tokens
        order=(),
        num_tokens=lambda config: config.max_source_positions,
        # SpecAugment draws by numpy, other masks on each rank; the weighted sum is one of all layers' tokens.
        needs=(("apply_spec_augment", False), *(("use_weighted_layer_sum", False, where) for where in ("sp", "pp"))),
    )
)  # fmt: skip
