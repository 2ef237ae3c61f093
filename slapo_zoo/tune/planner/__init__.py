"""Which (tp, pp, dp, micro-batch, recomputation) fits a cluster and is fastest, by simulation: the one model of cost.

Imports `cards`, `zoo` and lower.
"""
