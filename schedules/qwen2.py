"""Schedule table of Qwen2: that of Llama; q, k and v have a bias, which is sharded with their weights."""

from slapo_zoo.zoo.table import extend, register

QWEN2 = register(
    extend("llama", model_type="qwen2", source="transformers 5.23.0, models/qwen2/modeling_qwen2.py")
)
