"""Load and save checkpoint files: each rank reads and writes only the slices of its own shards.

Imports `language` and packages of lower floors (see CONTRIBUTING.md).
"""
