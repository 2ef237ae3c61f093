"""Scheduled model: its class, how it is built and loaded, the report of its memory, the watch for NaN and loss spikes.

Imports `model.step`, `model.checkpoints` and lower.
"""
