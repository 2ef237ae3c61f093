"""Other libraries with a scheduled model: Trainer, TRL, and engines that run it in place of torch.

Imports `model.step`, `model.checkpoints` and lower.
"""
