"""Derivation of sharding rules (a table) for a model family that has none, from a forward of a tiny model and from
its modules.

`slapo_zoo.verify.derive` proves each table before it is used.
"""
