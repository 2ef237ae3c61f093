"""Load a scheduled model: AutoScheduledModel and `build` choose how its modules are sharded and fill the weights.

Imports `model`, `verify`, `tune.planner` and packages below them (their order: CONTRIBUTING.md).
"""
