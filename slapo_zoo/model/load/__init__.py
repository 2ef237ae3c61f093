"""Load a scheduled model: AutoScheduledModel and `build` choose a schedule and fill the weights.

Imports `model`, `verify`, `tune.planner` and lower.
"""
