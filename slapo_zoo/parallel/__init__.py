"""Foundations of every rank: mesh, placements, the rank's plan, collectives.

Imports `errors` alone.
"""
