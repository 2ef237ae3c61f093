"""Load and save checkpoint files: each rank reads and writes only the slices of its own shards.

Among the packages of slapo_zoo it imports `language` and those below `language` in the list of CONTRIBUTING.md.
"""
