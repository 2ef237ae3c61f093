"""Scheduled model: class, assembly from an outline, loader, memory report, watch over numbers.

Imports `model.step`, `model.checkpoints` and lower.
"""
