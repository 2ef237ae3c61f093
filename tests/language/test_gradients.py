"""What happens to gradients between the backward and the optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_zoo.language import gradients
from slapo_zoo.language.directive import State
from slapo_zoo.parallel.mesh import Mesh


def summed(dtype):
    """Parameters whose gradient every rank, one rank, or no rank has; their sums over two ranks."""
    everywhere, once, nowhere = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(3))
    everywhere.grad = torch.full((3,), 2.0 + dist.get_rank(), dtype=dtype)
    if dist.get_rank() == 1:
        once.grad = torch.zeros(3, dtype=dtype)
    gradients.all_reduce_gradients([everywhere, nowhere, once], dist.group.WORLD)
    return [p.grad for p in (everywhere, once, nowhere)]


def test_a_gradient_that_no_rank_has_stays_missing(ranks):
    for dtype in (torch.float32, torch.bfloat16):
        for everywhere, once, nowhere in ranks.run(summed, 2, dtype):
            assert everywhere.tolist() == [5.0, 5.0, 5.0]
            assert once.tolist() == [0.0, 0.0, 0.0]
            assert nowhere is None


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.reshape(-1), lambda t: t.T])
def test_the_norm_of_a_large_gradient(make):
    """Added up one after the other in float32, 8 million squares lose a ten-thousandth."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.empty(0))
    grad = make(torch.randn(4099, 2048) * 1e-3)
    p.data, p.grad = torch.empty_like(grad), grad
    norm = gradients.global_norm([("w", p)], State(nn.Module(), Mesh()), Mesh(), {"w"})
    exact = grad.double().square().sum().sqrt()
    assert norm.dtype == torch.float32
    assert abs(norm.double() / exact - 1) < 1e-6
