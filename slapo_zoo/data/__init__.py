"""Rows for training, the same on every mesh: files and data sets read, tokenized, packed, masked and batched.

Imports `parallel` and `errors`.
"""
