"""Scheduled models (transformers models sharded over ranks): class, load, memory report, watch for NaN and loss spikes.

This package imports `model.step`, `model.checkpoints` and the packages that CONTRIBUTING.md lists below these two.
"""
