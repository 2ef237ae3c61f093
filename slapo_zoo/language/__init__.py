"""The schedule language: Directive, Schedule, explain, the primitives and the graphs they rewrite.

Imports `hf`, `dispatch` and packages of lower floors (see CONTRIBUTING.md).
"""
