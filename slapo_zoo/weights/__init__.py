"""Checkpoint files to local tensors and back: every rank touches only its own bytes.

Imports `language` and lower.
"""
