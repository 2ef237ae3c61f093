"""Losses of a batch that is split into micro-batches and over dp ranks: their means over the whole batch, and a table
of the forward arguments that are labels (`labels`, `start_positions`, ...) for each model head.

It imports `parallel` and `errors`.
"""
