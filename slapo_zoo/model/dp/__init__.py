"""Data parallelism: averages over dp, ZeRO, and the samples that a rank reads.

Imports `model.gradients`, `pipeline` and lower.
"""
