"""Foundations of every rank: mesh, placements, the rank's plan, collectives.

Of slapo_zoo it imports `errors` only.
"""
