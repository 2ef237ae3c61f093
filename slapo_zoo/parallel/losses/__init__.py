"""The loss of a sharded batch: means over micro-batches and dp ranks, and the labels that each head takes.

It imports `parallel` and `errors`.
"""
