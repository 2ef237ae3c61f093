"""Traces without example inputs: nothing is computed; only branches on values need an example."""

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from slapo_zoo import create_schedule
from slapo_zoo.errors import ScheduleError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, scale=None):
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind()
        scores = nnf.dropout(nnf.softmax(q @ k.transpose(-1, -2), -1), 0.1, self.training)
        y = (scores @ v).transpose(1, 2).reshape(rows, tokens, width)
        y += 1
        return nnf.relu(self.out(y) + 1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x, *, y):
        return self.b(self.a(x)) * y


class Decides(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class Unpacked(nn.Module):
    def forward(self, x):
        return [part + 1 for part in x]


def test_find_matches_operations_and_modules_without_example_inputs():
    schedule = create_schedule(Pair())
    assert len(schedule.find(lambda x: nnf.relu(x + 1))) == 2
    assert [path for path, _ in schedule["a"].find("out")] == ["a"]
    assert len(schedule.find("a|b", lambda x: nnf.softmax(x, -1))) == 2


@pytest.mark.parametrize(
    "options", [{}, {"flatten": True}, {"leaves": ["a"]}, {"recursive": False}]
)
@pytest.mark.parametrize("rows", [2, 3])
def test_module_traced_without_example_inputs_equals_the_untraced_module(options, rows):
    torch.manual_seed(0)
    model, x = Pair().eval(), torch.randn(rows, 5, 8)
    want = model(x, y=x)
    schedule = create_schedule(model)
    schedule.trace(**options)
    torch.testing.assert_close(schedule.state.model(x, y=x), want, rtol=0, atol=0)
    torch.manual_seed(1)
    schedule.state.model.train()
    assert not torch.equal(schedule.state.model(x, y=x), want)  # dropout follows the mode


@pytest.mark.parametrize("model", [Decides(), Unpacked()])
def test_trace_of_a_value_dependent_forward_raises_and_requests_example_inputs(model):
    with pytest.raises(ScheduleError, match="which has no example value") as caught:
        create_schedule(model).trace()
    assert "pass example_inputs" in str(caught.value)


class Gelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        return nnf.gelu(self.linear(x))


def test_find_matches_the_bias_addition_of_a_decomposed_linear():
    """An addition of tensors of unknown shape is not taken for arithmetic on sizes."""
    sch = create_schedule(Gelu())
    sch["linear"].decompose()
    sch.trace(flatten=True)
    for pattern in (lambda x, bias: nnf.gelu(bias + x), lambda x, bias: nnf.gelu(x + bias)):
        (found,) = sch.find(pattern)
        assert [node.name for _, node in found] == ["add", "gelu"]
