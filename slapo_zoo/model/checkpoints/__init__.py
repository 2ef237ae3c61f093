"""Files of a model in training: training checkpoints and LoRA adapters; also streams of unsharded weights.

This package imports `model.dp`, `model.gradients`, `zoo.cards` and the packages that CONTRIBUTING.md lists below these.
"""
