"""Ranks as processes or threads: start them, connect them, let a step fail on all of them if it fails on one, wait for
late ranks, and end all when one fails or a signal arrives.

The package imports `parallel.rng`, `parallel` and `errors`.
"""
