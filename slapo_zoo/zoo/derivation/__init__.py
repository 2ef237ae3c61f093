"""Tables for families that have none: watched on a tiny model, made from its modules, then proven.

`slapo_zoo.verify.derive` proves them; nothing here is used unproven.
"""
