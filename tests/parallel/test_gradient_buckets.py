"""All-reduce of gradients in buckets."""

import torch
import torch.distributed as dist
from torch import nn

from slapo_zoo.parallel import gradient_buckets


def summed(dtype):
    """All-reduce gradients that every rank, one rank, or no rank has, over two ranks."""
    everywhere, once, nowhere = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(3))
    everywhere.grad = torch.full((3,), 2.0 + dist.get_rank(), dtype=dtype)
    if dist.get_rank() == 1:
        once.grad = torch.zeros(3, dtype=dtype)
    gradient_buckets.all_reduce_gradients([everywhere, nowhere, once], dist.group.WORLD)
    return [p.grad for p in (everywhere, once, nowhere)]


def test_gradient_all_reduce_leaves_a_gradient_that_no_rank_has_as_none(ranks):
    for dtype in (torch.float32, torch.bfloat16):
        for everywhere, once, nowhere in ranks.run(summed, 2, dtype):
            assert everywhere.tolist() == [5.0, 5.0, 5.0]
            assert once.tolist() == [0.0, 0.0, 0.0]
            assert nowhere is None
