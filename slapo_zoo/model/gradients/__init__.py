"""Gradients: after any backward the `.grad` of a rank is its shard of the gradient that one process would compute.

This package imports `language` and the packages that CONTRIBUTING.md lists below it.
"""
