"""Comparison with other libraries: the same weights and batch, in one run."""
