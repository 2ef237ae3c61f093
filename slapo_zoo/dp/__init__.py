"""Data parallelism: averages over dp, ZeRO, and the samples that a rank reads.

Imports `gradients`, `pipeline` and lower.
"""
