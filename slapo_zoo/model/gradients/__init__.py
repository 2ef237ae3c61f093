"""Gradients: after any backward each rank's `.grad` is its part of the true gradient.

Imports `language` and lower.
"""
