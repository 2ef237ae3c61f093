"""Processes of a job: launch, join, agree, wait for one another, end together; or all as threads.

Imports `rng` and lower.
"""
