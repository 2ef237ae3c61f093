"""Models that `transformers` lacks, written as its classes; `hf.models.register_models` registers them."""
