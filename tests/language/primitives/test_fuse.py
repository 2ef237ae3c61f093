"""fuse, decompose and replace of a subgraph on real models: outputs and gradients stay the same."""

import pytest
import torch
from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph.pattern import Pattern, call_module
from slapo_zoo.language.schedule import Schedule, from_json
from tiny_models import assert_same_step, batch_for, tiny_model

F = nn.functional

LAYER = "bert.encoder.layer.0"


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def scheduled_bias_gelu(**fuse):
    sch = Schedule(tiny_model("bert"))
    sch["bert.encoder.layer.*.intermediate.dense"].decompose()
    sch["bert.encoder.layer.*.intermediate"].trace(flatten=True)
    for path in sch["bert.encoder.layer.*.intermediate"].paths:
        (match,) = sch[path].find(bias_gelu)
        sch[path].fuse(match, **fuse)
    return sch


def test_fuse_without_compiler_groups_bias_gelu_into_a_module_with_equal_gradients():
    sch = scheduled_bias_gelu(compiler=None, name="BiasGelu")
    assert "BiasGelu_0" in dict(sch[f"{LAYER}.intermediate"].mod.named_children())
    assert_same_step(sch.model, tiny_model("bert"))
    with pytest.raises(ScheduleError, match="holds nodes of a graph in memory"):
        sch.to_json()


def test_bias_gelu_fused_by_torchscript_keeps_outputs_and_gradients():
    sch = scheduled_bias_gelu(compiler="TorchScript")
    assert_same_step(sch.model, tiny_model("bert"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about their own code
def test_bias_gelu_fused_by_inductor_keeps_outputs_and_gradients():
    sch = scheduled_bias_gelu()
    assert_same_step(sch.model, tiny_model("bert"))


def test_fused_bias_dropout_residual_layer_norm_keeps_outputs_and_gradients():
    sch = Schedule(tiny_model("bert"))
    out = sch[f"{LAYER}.output"]
    sch[f"{LAYER}.output.dense"].decompose()
    out.trace(flatten=True)

    class BiasDropoutResidualNorm(Pattern):
        def __init__(self):
            super().__init__()
            self.dropout, self.norm = nn.Dropout(), nn.LayerNorm(1)

        def forward(self, x, bias, residual):
            return self.norm(self.dropout(x + bias) + residual)

    found = out.find(BiasDropoutResidualNorm())
    assert len(found) == 1
    out.fuse(found, compiler=None)
    assert_same_step(sch.model, tiny_model("bert"))


def test_fused_conv_norm_relu_of_resnet_keeps_outputs_and_gradients():
    sch = Schedule(tiny_model("resnet"))
    path = "resnet.encoder.stages.1.layers.1.layer.0"
    sch[path].trace(flatten=True)

    class ConvNormRelu(Pattern):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()

        def forward(self, x):
            return self.act(self.norm(self.conv(x)))

    sch[path].fuse(sch[path].find(ConvNormRelu()), compiler=None)
    assert_same_step(sch.model, tiny_model("resnet"))


class FusedQKV(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * size, size))
        self.bias = nn.Parameter(torch.empty(3 * size))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).chunk(3, dim=-1)


@pytest.mark.parametrize("by_name", [True, False])
def test_query_key_and_value_fused_into_one_matmul_keep_outputs_and_gradients(by_name):
    sch, plain = Schedule(tiny_model("bert")), tiny_model("bert")
    attention = sch[f"{LAYER}.attention.self"]
    attention.trace(flatten=True)
    found = (
        "query|key|value" if by_name else attention.find(lambda x: call_module("q.*|k.*|v.*", x))
    )
    attention.replace(FusedQKV(32), found, carry=True)
    names = [n for n, _ in attention.mod.named_parameters()]
    assert names == ["FusedQKV_0.weight", "FusedQKV_0.bias"]
    assert f"{LAYER}.attention.self.query" not in sch
    assert_same_step(sch.model, plain, same_names=False)
    grad = plain.bert.encoder.layer[0].attention.self.key.weight.grad
    torch.testing.assert_close(attention.mod.FusedQKV_0.weight.grad[32:64], grad)


def attention_of(query, key, value, mask, scale, p):
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + mask
    probabilities = F.dropout(F.softmax(scores, dim=-1), p)
    return torch.matmul(probabilities, value), probabilities


def test_explicit_softmax_attention_replaced_by_sdpa_keeps_outputs_and_gradients():
    model, plain = (tiny_model("bert") for _ in range(2))
    for m in (model, plain):
        m.set_attn_implementation("eager")
        m.config.attention_probs_dropout_prob = 0.0
        for layer in m.bert.encoder.layer:
            layer.attention.self.dropout.p = 0.0
    sch = Schedule(model)
    attention = sch[f"{LAYER}.attention.self"]
    attention.trace(flatten=True)

    def sdpa(query, key, value, mask, scale, p):
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=p, scale=scale)
        return y, None  # nobody reads the probabilities, which the eager attention returns too

    without = attention.find(lambda q, k, v, m, s, p: attention_of(q, k, v, m, s, p)[0])
    assert not without
    assert "dropout is also used by output" in without.rejected[0][1]
    found = attention.find(attention_of)
    assert len(found) == 1
    assert found[0].inputs["scale"] == 8**-0.5
    attention.replace(sdpa, found)
    targets = [getattr(n.target, "__name__", n.target) for n in attention.mod.graph.nodes]
    assert "softmax" not in targets
    assert_same_step(sch.model, plain)


def test_invalid_arguments_of_fuse_and_subgraph_replace_raise():
    sch = Schedule(tiny_model("bert"))
    layer = sch[f"{LAYER}.intermediate"]
    with pytest.raises(ScheduleError, match="the module has no graph"):
        layer.fuse(bias_gelu)
    layer.trace(flatten=True)
    with pytest.raises(ScheduleError, match="nothing in the graph matches"):
        layer.fuse(bias_gelu)
    with pytest.raises(ScheduleError, match="found compiler 'tvm'"):
        layer.fuse("dense", compiler="tvm")
    with pytest.raises(ScheduleError, match="found no argument subgraph="):
        layer.fuse()
    with pytest.raises(ScheduleError, match="no kernel 'nope'"):
        layer.replace("nope", subgraph="dense")
    found = layer.find(lambda x: F.gelu(x))
    layer.replace(F.gelu, found)
    with pytest.raises(ScheduleError, match=r"not in the graph of .* any more"):
        layer.replace(F.gelu, found)
    found, other = layer.find(lambda x: F.gelu(x)), sch["bert.encoder.layer.1"]
    other.trace()
    with pytest.raises(ScheduleError, match=r"use sch\['bert.encoder.layer.0.intermediate'\]"):
        other.replace(F.gelu, found)


def test_single_graph_nodes_replaced_by_equal_functions_keep_outputs_and_gradients():
    sch, plain = Schedule(tiny_model("bert")), tiny_model("bert")
    layer = sch[f"{LAYER}.intermediate"]
    layer.trace(flatten=True)
    (node,) = layer.find(lambda node: getattr(node.target, "__name__", "") == "gelu")
    layer.replace(lambda input, approximate="none": F.gelu(input), node)
    (dense,) = layer.find("dense")
    layer.replace(plain.bert.encoder.layer[0].intermediate.dense, target_ops=dense)
    assert "Linear_0" in dict(layer.mod.named_children())
    assert "dense" not in layer.child
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(sch.model(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize(("family", "path"), [("bert", f"{LAYER}.intermediate.dense"),
                                              ("gpt2", "transformer.h.0.mlp.c_fc")])  # fmt: skip
def test_decompose_splits_a_linear_into_matmul_and_bias_and_keeps_gradients(family, path):
    sch, plain = Schedule(tiny_model(family)), tiny_model(family)
    names = list(sch.model.state_dict())
    sch[path].decompose()
    assert_same_step(sch.model, plain)
    assert list(sch.model.state_dict()) == names
    parent = path.rpartition(".")[0]
    sch[parent].trace(flatten=True)
    assert len(sch[parent].find(lambda x, b: x + b)) >= 1
    assert str(Schedule(tiny_model(family)).replay(from_json(sch.to_json()))) == str(sch)


def test_decompose_of_a_linear_without_bias_keeps_the_output_and_refuses_other_modules():
    sch = Schedule(nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2)))
    x = torch.randn(3, 4)
    y = sch.model(x)
    sch["0"].decompose()
    torch.testing.assert_close(sch.model(x), y)
    with pytest.raises(ScheduleError, match="found ReLU, expected Linear or Conv1D"):
        sch["1"].decompose()
    with pytest.raises(ScheduleError, match="expected Linear or Conv1D"):
        sch["0"].decompose()
    sch["2"].shard("weight", 0)
    with pytest.raises(ScheduleError, match=r"call decompose\(\) before shard"):
        sch["2"].decompose()
