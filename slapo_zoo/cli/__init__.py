"""The command line `slapo-zoo`: its commands, and the training loop of `slapo-zoo train`.

It may import every other package of slapo_zoo, and none of them imports it.
"""
