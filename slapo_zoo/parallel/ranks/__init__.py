"""Processes of a job: launch, join, agree, wait for one another, end together; or all as threads.

Imports `parallel.rng` and lower.
"""
