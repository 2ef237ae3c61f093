"""AutoScheduledModel: loading, train_step, data parallelism, adapters, checkpoints, Trainer, dialects.

Imports `cards`, `zoo` and lower.
"""
