"""Models that `transformers` lacks, as its own classes; `hf.register_models` makes them known to it."""
