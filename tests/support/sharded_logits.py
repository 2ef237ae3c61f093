"""Sharded logits: each rank holds some columns."""

import torch.distributed as dist
from torch.nn import functional

from slapo_zoo.kernels.loss.vocab_logits import VocabLogits


def wrapped(full):
    """Return this rank's columns of full logits, with a gradient; padding holds huge values."""
    n, r, size = dist.get_world_size(), dist.get_rank(), full.shape[-1]
    share = -(-size // n)
    columns = full[..., r * share : (r + 1) * share]
    padding = share - columns.shape[-1]
    local = functional.pad(columns, (0, padding), value=1e9).requires_grad_()
    group = dist.group.WORLD if n > 1 else None
    return local, VocabLogits.wrap(local, size, group)
