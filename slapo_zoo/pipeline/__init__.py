"""Pipeline parallelism: stages, orders of micro-batches, the runtime that executes them, and timelines.

Imports `language` and packages of lower floors (see CONTRIBUTING.md).
"""
