"""Processes of a job: launch, join, agree, wait for one another, end together; or all as threads.

It imports `parallel.rng` and packages of lower floors (see CONTRIBUTING.md).
"""
