"""Ours beside what else a user could take: the same weights and batch, in one run."""
