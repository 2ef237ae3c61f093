"""Training of a scheduled model: options, checks, inputs, the run of Trainer, records, evaluation."""
