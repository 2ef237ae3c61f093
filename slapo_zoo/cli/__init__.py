"""The command line: commands, `train`, the demo, comparison with baselines.

Imports everything below; nothing imports it.
"""
