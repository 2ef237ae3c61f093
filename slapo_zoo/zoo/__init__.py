"""Zoo: make a schedule from a config by tables, rules, options, derivation and the choice of kernels.

Imports `pipeline`, `weights` and lower; tables are found by name.
"""
