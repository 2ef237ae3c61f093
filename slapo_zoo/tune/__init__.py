"""Search for the fastest batch size, recomputation, kernels and mesh of a model, by measuring training steps."""
