"""Mesh, placements, the plan of a rank, collectives: what every rank shares.

Imports `errors` alone.
"""
