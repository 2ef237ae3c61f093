"""Stages, pipeline orders, the runtime that executes them, timelines.

Imports `language` and lower.
"""
