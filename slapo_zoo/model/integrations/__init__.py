"""Use of a scheduled model by other libraries: Trainer, TRL, and engines such as DeepSpeed and Megatron.

Imports `model.step`, `model.checkpoints` and packages below them (their order: CONTRIBUTING.md).
"""
