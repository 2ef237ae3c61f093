"""OLMo-3: OLMo-2's blocks; most of them look back a window only."""

from slapo_zoo.zoo.table import extend, register

OLMO3 = register(
    extend(
        "olmo2",
        model_type="olmo3",
        source="transformers 5.23.0, models/olmo3/modeling_olmo3.py",
        body=(),
    )
)
