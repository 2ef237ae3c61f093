"""Foundations of every rank: mesh, sharding of each tensor, collectives.

Of slapo_zoo it imports `errors` only.
"""
