"""Losses of sharded batches and vocabularies: exact means over micro-batches and dp, logits over tp.

Imports `parallel` and `errors`.
"""
