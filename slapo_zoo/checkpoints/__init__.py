"""What is written and read back while a model trains: training checkpoints, whole weights, adapters.

Imports `dp`, `gradients`, `cards` and lower.
"""
