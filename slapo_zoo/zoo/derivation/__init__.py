"""Derivation of sharding rules (a table) for a model family that has none, from a forward of a tiny model and from
its modules.

`slapo_zoo.verify.derive` compares a model sharded by a new table with plain transformers before the table is used.
"""
