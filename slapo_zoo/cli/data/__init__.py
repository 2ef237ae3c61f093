"""From files and data sets to the batches of every step: read, tokenize, pack, deal out, mask."""
