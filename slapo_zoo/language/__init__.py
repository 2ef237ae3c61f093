"""Package of the schedule language: Directive, Schedule, explain, and the primitives with the graphs that they rewrite.

The package imports only `hf`, `dispatch` and the packages that CONTRIBUTING.md lists below it.
"""
