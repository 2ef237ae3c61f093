"""Planner: predict by simulation which layouts (tp, pp, dp, micro-batches, recomputation) of a model fit into the
memory of a cluster's devices, and which of them trains fastest.
"""
