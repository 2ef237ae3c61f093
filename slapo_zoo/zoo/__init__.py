"""Schedules made from a model's config: tables, their rules, options, derivation of tables, choice of kernels.

Imports `pipeline`, `weights` and lower; tables are found by name in `schedules`.
"""
