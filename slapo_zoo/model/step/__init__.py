"""One forward or training step on a mesh: batch, padding, precision, outputs, losses, generation.

Imports `model.dp`, `model.gradients` and packages below them (their order: CONTRIBUTING.md).
"""
