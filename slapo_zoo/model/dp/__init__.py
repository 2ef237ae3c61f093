"""Data parallelism: gradients averaged over dp ranks, ZeRO, and the samples that each dp rank reads.

This package imports `model.gradients`, `pipeline` and the packages that CONTRIBUTING.md lists below these two.
"""
