"""Libraries around a scheduled model: Trainer, TRL, and the engines that run it in place of torch.

Imports `model.step`, `model.checkpoints` and lower.
"""
