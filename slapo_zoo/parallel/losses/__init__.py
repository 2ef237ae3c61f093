"""The loss of a sharded batch: means over micro-batches and dp ranks, and what each head is trained on.

Imports `parallel` and `errors`.
"""
