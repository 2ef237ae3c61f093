"""Schedule table of OLMo-3: the rows of OLMo-2's table. Most blocks have a sliding window, which is in the mask."""

from slapo_zoo.zoo.table import extend, register

OLMO3 = register(
    extend(
        "olmo2",
        model_type="olmo3",
        source="transformers 5.23.0, models/olmo3/modeling_olmo3.py",
        body=(),
    )
)
