"""The loss of a sharded batch or vocabulary: means over micro-batches, and of logits over tp.

Imports `parallel` and `errors`.
"""
