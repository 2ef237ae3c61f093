"""The command line: commands, the data of a training run, and `train`.

It may import every other package of slapo_zoo, and none of them imports it.
"""
