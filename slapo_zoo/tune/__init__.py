"""Search for the fastest values of a schedule's knobs by measuring them.

Imports `model`, `tune.planner` and lower.
"""
