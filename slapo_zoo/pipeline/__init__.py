"""Package for pipeline parallelism: stages, orders of micro-batches, the runtime that executes them, and timelines.

The package imports only `language` and the packages that CONTRIBUTING.md lists below it.
"""
