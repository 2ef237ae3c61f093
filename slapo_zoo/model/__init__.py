"""A scheduled model: its class, its assembly from an outline, its memory and its numbers.

Imports `model.step`, `model.checkpoints` and lower.
"""
