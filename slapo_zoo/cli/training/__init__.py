"""Training of a scheduled model: options, checks, inputs, training loop, log and evaluation."""
