"""Loss of a language model: from logits or hidden states, over a sharded vocabulary, and the lazy and sharded logits
that the unmodified loss code of `transformers` runs on. It imports no other kernel.
"""
