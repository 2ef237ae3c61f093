"""Gradients between the backward and the optimizer step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class Largest(TorchDispatchMode):
    """Context that notes in `size` the most elements of a tensor in new memory."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in known:
            self.size = max(self.size, out.numel())
        return out


def test_global_norm_allocates_no_copy_of_gradients_that_several_ranks_hold():
    p = nn.Parameter(torch.zeros(64, 8192))
    p.grad = torch.ones_like(p)
    row = SimpleNamespace(placement=object(), replicas=lambda mesh: 4)
    plan = SimpleNamespace(mesh=Mesh(), owns=lambda name: True, of=lambda name: row)
    with Largest() as largest:
        norm = gradients.global_norm([("w", p)], plan)
    assert float(norm) == pytest.approx((p.numel() / 4) ** 0.5)
    assert largest.size < p.numel() / 100
