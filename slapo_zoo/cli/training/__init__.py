"""Training of a sharded model by `slapo-zoo train`: options, checks, inputs, training loop, log and evaluation."""
