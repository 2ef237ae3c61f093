"""Calls of an operator that nobody traces skip the dispatcher; all other calls are seen as slapo_zoo::<name>."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_zoo.errors import SlapoError
from slapo_zoo.kernels.rms_norm import rms_norm
from slapo_zoo.parallel.once import runs_at_once


class Seen(TorchDispatchMode):
    """Mode that records the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def given():
    torch.manual_seed(0)
    return torch.randn(5, 16, requires_grad=True), torch.randn(16, requires_grad=True)


def gradients(x, weight):
    out = rms_norm(x, weight)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))]


def test_direct_call_has_the_bits_of_the_operator():
    direct = gradients(*given())
    with Seen() as seen:
        through = gradients(*given())
    assert {"slapo_zoo.norm.default", "slapo_zoo.norm_backward.default"} <= seen.names
    assert all(torch.equal(a, b) for a, b in zip(direct, through, strict=True))


def test_direct_call_of_an_operator_refuses_a_second_derivative():
    x, weight = given()
    with pytest.raises(SlapoError, match="create_graph"):
        torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)


def test_calls_are_not_direct_where_a_mode_a_transform_or_a_compiler_sees_them():
    assert runs_at_once()
    with Seen():
        assert not runs_at_once()
    with TorchFunctionMode():
        assert not runs_at_once()
    found = []
    torch.func.grad(lambda x: found.append(runs_at_once()) or x.sum())(torch.ones(2))
    assert found == [False]
    assert torch.compile(lambda x: x + runs_at_once(), backend="eager")(torch.zeros(())) == 0
