"""Sharding rules for OLMo-3: those of OLMo-2. Most blocks have a sliding window, which is in the mask."""

from slapo_zoo.zoo.table import extend, register

OLMO3 = register(
    extend(
        "olmo2",
        model_type="olmo3",
        source="transformers 5.23.0, models/olmo3/modeling_olmo3.py",
        body=(),
    )
)
