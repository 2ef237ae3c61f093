"""What is written and read back while a model trains: training checkpoints, whole weights, adapters.

Imports `model.dp`, `model.gradients`, `cards` and lower.
"""
