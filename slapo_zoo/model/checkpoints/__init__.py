"""Files of a model in training: training checkpoints, streams of unsharded weights, adapters.

This package imports `model.dp`, `model.gradients`, `zoo.cards` and lower layers.
"""
