"""AutoScheduledModel and build: which schedule a model gets, and from where its weights come.

Imports `model`, `verify`, `tune.planner` and lower.
"""
