"""Planner: simulate which layout (tp, pp, dp, micro-batches, recomputation) fits a cluster and is fastest.

Imports `zoo.cards`, `zoo` and lower.
"""
