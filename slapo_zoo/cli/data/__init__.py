"""Data of a training run: reading of files and data sets, tokenization, packing, batches, masks."""
