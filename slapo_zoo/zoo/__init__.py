"""From a config to a program: tables, rules, knobs, derivation, the choice of kernels.

Imports `pipeline`, `weights` and lower; tables are found by name.
"""
