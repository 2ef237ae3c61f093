"""Modules that all kinds of parallelism use: mesh of ranks, sharding of each tensor, collectives, losses, launch.

Of slapo_zoo the package imports `errors` only.
"""
