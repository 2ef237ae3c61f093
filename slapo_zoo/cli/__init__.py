"""The command line: commands, the data of a training run, and `train`.

Imports packages of all lower floors (see CONTRIBUTING.md); no other package imports it.
"""
