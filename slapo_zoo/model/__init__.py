"""Scheduled model: class, build and load, report of the memory that it takes, watch for NaN and loss spikes.

This package imports `model.step`, `model.checkpoints` and lower layers.
"""
