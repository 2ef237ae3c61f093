"""Models that `transformers` lacks, as subclasses of its PreTrainedModel; `hf.models.register_models` registers them."""
