"""Load and save checkpoint files: each rank reads and writes only the slices of its own shards.

The package imports `hf`, `parallel` with its subpackages, and `errors`.
"""
