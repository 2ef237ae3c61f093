"""Checkpoint files to local tensors and back: every rank touches only its own bytes."""
