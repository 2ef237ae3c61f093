"""Schedules made from a model's config: tables of sharding rules, their derivation, options, choice of kernels.

Imports `pipeline`, `weights` and lower; tables are found by name in `schedules`.
"""
