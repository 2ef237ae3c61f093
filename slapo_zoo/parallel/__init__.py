"""Mesh, placements, collectives, random streams, process groups, launch: what every rank shares.

Imports `errors` alone.
"""
