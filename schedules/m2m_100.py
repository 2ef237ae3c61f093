"""M2M-100 and NLLB: mBART's layers; positions are sines, which no checkpoint holds."""

from slapo_zoo.zoo.table import extend, register

M2M_100 = register(
    extend("bart", model_type="m2m_100", source="transformers 5.23.0, models/m2m_100/modeling_m2m_100.py")
)
