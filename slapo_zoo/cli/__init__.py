"""The command line: commands, the data of a training run, and `train`.

Imports everything below; nothing imports it.
"""
