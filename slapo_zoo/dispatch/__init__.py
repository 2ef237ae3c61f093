"""Which kernel runs, and why: the registry, CPU matrix products, measured tables.

Imports `parallel`; `slapo_zoo.kernels` stands on it.
"""
