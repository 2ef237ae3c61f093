"""Search for the fastest batch size, recomputation, kernels and mesh of a model, by measuring training steps.

This package imports `model`, `tune.planner` and lower packages.
"""
