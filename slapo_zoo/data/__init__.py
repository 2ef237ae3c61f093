"""Training data: read, tokenize, pack, mask and batch rows; the batches do not depend on the number of ranks.

Imports `parallel` and `errors`.
"""
