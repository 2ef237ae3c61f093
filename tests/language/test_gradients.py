"""Gradients between the backward and the optimizer step."""

import pytest
import torch
from torch import nn

from slapo_zoo.language import gradients
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.reshape(-1), lambda t: t.T])
def test_global_norm_of_8_million_gradient_elements_equals_the_float64_norm(make):
    """Adding 8 million squares one after the other in float32 has a relative error of 1e-4."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.empty(0))
    grad = make(torch.randn(4099, 2048) * 1e-3)
    p.data, p.grad = torch.empty_like(grad), grad
    norm = gradients.global_norm([("w", p)], RankPlan(Mesh(), {}))
    exact = grad.double().square().sum().sqrt()
    assert norm.dtype == torch.float32
    assert abs(norm.double() / exact - 1) < 1e-6
