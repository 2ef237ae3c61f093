"""The matcher compares operations, edges, constants and uses, not spelling or order."""

import operator

import pytest
import torch
from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph.canonical import ModuleTensor
from slapo_zoo.language.graph.find import find
from slapo_zoo.language.graph.pattern import ANY, ModulePattern, Pattern, call_module
from slapo_zoo.language.graph.trace import trace_module

F = nn.functional

X = torch.randn(2, 3, 8)


class Net(nn.Module):
    """Module whose forward is a function of its submodules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, *args):
        return self.function(self, *args)


def search(function, pattern, *args, **modules):
    traced = trace_module(Net(function, **modules), args or (X,), flatten=True)
    return find(traced, "", pattern)


def count(function, pattern, *args, **modules):
    return len(search(function, pattern, *args, **modules))


SPELLINGS = {
    "operator": lambda m, x: x.relu() + m.bias,
    "reversed": lambda m, x: m.bias + F.relu(x),
    "function": lambda m, x: torch.add(torch.relu(x), m.bias),
    "method": lambda m, x: F.relu(x).add(m.bias),
    "in place": lambda m, x: operator.iadd(F.relu(x, inplace=True), m.bias),
    "module": lambda m, x: m.act(x) + m.bias,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_graph_pattern_matches_function_method_and_module_forms_of_an_operation(spelling):
    def forward(m, x):
        return SPELLINGS[spelling](m, x * 1)

    assert count(forward, lambda x, b: F.relu(x) + b, act=nn.ReLU()) == 1
    assert count(forward, lambda x, b: x.relu().add(b), act=nn.ReLU()) == 1
    assert count(forward, lambda x, b: F.relu(x) - b, act=nn.ReLU()) == 0
    assert count(forward, lambda x, b: F.gelu(x) + b, act=nn.ReLU()) == 0


def softmax_of(x, q, k):
    return torch.softmax(q @ k.transpose(-2, -1) / 2, dim=-1) @ x


def test_graph_pattern_does_not_match_equal_operations_with_exchanged_inputs():
    """The same operations in the same order with q and k exchanged are another computation."""
    args = (X, X + 1, X + 2)

    def straight(m, x, q, k):
        return softmax_of(x, q.exp(), k.tanh())

    def pattern(x, q, k):
        return softmax_of(x, q.exp(), k.tanh())

    def swapped(m, x, q, k):
        a, b = q.exp(), k.tanh()
        return softmax_of(x, b, a)

    assert count(straight, pattern, *args) == 1
    assert count(swapped, pattern, *args) == 0
    assert count(swapped, lambda x, q, k: softmax_of(x, k.tanh(), q.exp()), *args) == 1
    # a subtraction is not commutative, an addition is
    assert count(lambda m, x: x.exp() - x.tanh(), lambda x: x.tanh() - x.exp()) == 0
    assert count(lambda m, x: x.exp() + x.tanh(), lambda x: x.tanh() + x.exp()) == 1


def test_graph_pattern_argument_used_twice_matches_only_one_value():
    assert count(lambda m, x: x.exp() + x, lambda x: x.exp() + x) == 1
    assert count(lambda m, x: x.exp() + m.bias, lambda x: x.exp() + x) == 0


def test_graph_pattern_matches_only_operations_with_equal_constants():
    def gelu(m, x):
        return F.gelu(x, approximate="tanh")

    assert count(gelu, lambda x: F.gelu(x)) == 0  # erf for tanh differs by 5e-4
    assert count(gelu, lambda x: F.gelu(x, approximate="tanh")) == 1
    assert count(lambda m, x: m.act(x), lambda x: F.gelu(x), act=nn.GELU()) == 1
    assert count(lambda m, x: m.act(x), lambda x: F.gelu(x), act=nn.GELU("tanh")) == 0
    assert count(lambda m, x: x * 2.0, lambda x: x * 3.0) == 0
    assert count(lambda m, x: x * 2.0, lambda x: x * 2) == 1
    assert count(lambda m, x: x * 2.0, lambda x: x * ANY) == 1
    assert count(lambda m, x: x.transpose(1, 2), lambda x: x.transpose(-2, -1)) == 1
    assert count(lambda m, x: x.transpose(1, 2), lambda x: x.transpose(0, 1)) == 0
    assert count(lambda m, x: x.permute(0, 2, 1), lambda x: x.permute((0, 2, 1))) == 1
    assert count(lambda m, x: x.softmax(2), lambda x: F.softmax(x, dim=-1)) == 1
    assert count(lambda m, x: x.softmax(1), lambda x: F.softmax(x, dim=-1)) == 0
    assert count(lambda m, x: m.soft(x), lambda x: torch.softmax(x, -1), soft=nn.Softmax(-1)) == 1


def test_argument_of_a_graph_pattern_matches_constants_and_parameters():
    (match,) = search(lambda m, x: F.dropout(x, 0.25, True), lambda x, p: F.dropout(x, p))
    assert match.inputs["p"] == 0.25
    norm = nn.LayerNorm(8, eps=1e-6)
    (match,) = search(
        lambda m, x: m.norm(x),
        lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-6),
        norm=norm,
    )
    assert match.inputs["w"] == ModuleTensor("norm", "weight")
    (match,) = search(lambda m, x: m.fc(x), lambda x, w, b: F.linear(x, w, b), fc=nn.Linear(8, 8))
    assert match.inputs["b"] == ModuleTensor("fc", "bias")
    pattern = lambda x, w: F.linear(x, w)  # noqa: E731 - no bias: another operation
    assert count(lambda m, x: m.fc(x), pattern, fc=nn.Linear(8, 8)) == 0
    assert count(lambda m, x: m.fc(x), pattern, fc=nn.Linear(8, 8, bias=False)) == 1


def test_graph_match_is_rejected_when_an_inner_value_is_used_outside_the_match():
    def twice(m, x):
        y = x.exp()
        return y.tanh() + y

    found = search(twice, lambda x: x.exp().tanh())
    assert not found
    assert "exp is also used by add" in found.rejected[0][1]
    assert count(twice, lambda x: x.exp().tanh() + x.exp()) == 0  # two exps are not one
    assert count(twice, lambda x: (lambda y: y.tanh() + y)(x.exp())) == 1


def test_graph_match_is_rejected_when_an_outside_operation_lies_between_its_nodes():
    """An operation outside the match lies between two of its nodes, so the match cannot run as one."""

    def forward(m, x):
        y = x.exp()
        return y, y.sin() + y.tanh()

    found = search(forward, lambda x, z: (x.exp(), z + x.tanh()))
    assert not found
    found = search(forward, lambda x, z: (lambda y: (y, z + y.tanh()))(x.exp()))
    assert not found
    assert "on the way to an input" in found.rejected[0][1]


def test_overlapping_graph_matches_keep_the_first_and_report_the_others_as_rejected():
    found = search(lambda m, x: x.exp().exp().exp(), lambda x: x.exp().exp())
    assert len(found) == 1
    assert len(found.overlapping) == 1
    assert [n.name for n in found[0].nodes] == ["exp", "exp_1"]
    assert [n.name for _, n in found.overlapping[0]] == ["exp_1", "exp_2"]


class ConvNormRelu(Pattern):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


def test_pattern_class_matches_modules_of_its_types_with_any_sizes():
    modules = {"a": nn.Conv2d(3, 4, 3), "b": nn.BatchNorm2d(4), "c": nn.Conv2d(4, 4, 1)}
    image = torch.rand(2, 3, 5, 5)

    def forward(m, x):
        return m.c(F.relu(m.b(m.a(x))))

    (match,) = search(forward, ConvNormRelu(), image, **modules)
    assert [n.name for n in match.nodes] == ["a", "b", "relu"]
    assert len(search(forward, ConvNormRelu, image, **modules)) == 1  # the class will do
    modules["b"] = nn.InstanceNorm2d(4)
    assert count(forward, ConvNormRelu(), image, **modules) == 0


def test_graph_pattern_with_call_module_matches_modules_by_regular_expression():
    modules = {"query": nn.Linear(8, 8), "key": nn.Linear(8, 8), "keys": nn.Linear(8, 8)}

    def forward(m, x):
        return m.query(x) + m.key(x) + m.keys(x)

    assert count(forward, lambda x: call_module("query|key", x), **modules) == 2
    assert count(forward, lambda x: call_module(".*", x) + call_module("key", x), **modules) == 1

    class Named(Pattern):
        def __init__(self):
            super().__init__()
            self.any = ModulePattern("k.*")

        def forward(self, x):
            return self.any(x)

    assert count(forward, Named(), **modules) == 2
    assert [n.target for _, n in search(forward, "key|query", **modules)] == ["query", "key"]
    predicate = search(forward, lambda node: node.target is operator.add, **modules)
    assert len(predicate) == 2


def test_graph_pattern_for_a_product_does_not_match_products_of_tensor_sizes():
    assert count(lambda m, x: x.reshape(x.shape[0] * x.shape[1], -1), lambda a, b: a * b) == 0


def test_invalid_graph_patterns_are_refused():
    for pattern, text in (
        (lambda x, y: x.exp(), r"\['y'\] are not used"),
        (lambda x: x, "computes nothing"),
        (lambda x: x if x.sum() > 0 else x.exp(), "without sizes and `if`"),
        (7, "a regex, a predicate"),
    ):
        with pytest.raises(ScheduleError, match=text):
            search(lambda m, x: x.exp(), pattern)
    with pytest.raises(ScheduleError, match="was called outside of a pattern"):
        call_module("a")
