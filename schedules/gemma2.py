"""Sharding rules for Gemma 2: those of Gemma, and two for the norms around the feed-forward."""

from slapo_zoo.zoo.rules import whole
from slapo_zoo.zoo.table import extend, register

GEMMA2 = register(
    extend(
        "gemma",
        model_type="gemma2",
        source="transformers 5.23.0, models/gemma2/modeling_gemma2.py",
        body=(
            # module                                rule     per rank
            ("layers.*.pre_feedforward_layernorm",  whole),  # [D]
            ("layers.*.post_feedforward_layernorm", whole),  # [D]
        ),
    )
)
