"""Files of a model in training: training checkpoints, streams of unsharded weights, adapters.

Imports `model.dp`, `model.gradients`, `zoo.cards` and lower.
"""
