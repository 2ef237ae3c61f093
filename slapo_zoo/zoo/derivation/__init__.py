"""Derivation of tables for families without one, from a forward of a tiny model and from its modules.

`slapo_zoo.verify.derive` proves each table before it is used.
"""
