"""trace, trace_until and find as directives of a schedule."""

import builtins
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.hf.attention import register_attention
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.language.graph.traced import TracedModule
from slapo_zoo.language.schedule import Schedule, from_json
from slapo_zoo.parallel.mesh import Mesh
from tiny_models import batch_for, tiny_model

BLOCK = "transformer.h.1"


def outputs(model, batch):
    return model(**batch).logits


@pytest.mark.parametrize("flatten", [True, False])
def test_model_with_traced_blocks_has_the_outputs_of_the_untraced_model(flatten):
    model, plain = tiny_model("gpt2"), tiny_model("gpt2")
    sch = Schedule(model)
    sch["transformer.h.*"].trace(flatten=flatten)
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(outputs(model, batch), outputs(plain, batch), rtol=0, atol=0)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(sch[BLOCK].mod, TracedModule)
    assert isinstance(sch[BLOCK].mod.attn, TracedModule) is not flatten
    assert model.transformer.h[1].attn.num_heads == 4  # attributes and classes by name stay
    assert sch["**:GPT2Block"].paths == ["transformer.h.0", "transformer.h.1"]


def test_trace_directive_replayed_from_json_gives_the_same_code():
    sch = Schedule(tiny_model("gpt2"))
    sch[BLOCK].trace(leaves=["attn", "GPT2MLP"], flatten=True)
    again = Schedule(tiny_model("gpt2")).replay(from_json(sch.to_json()))
    assert str(again) == str(sch)
    assert str(sch) == f"sch['{BLOCK}'].trace(leaves=('attn', 'GPT2MLP'), flatten=True)"
    assert again[BLOCK].mod.code == sch[BLOCK].mod.code
    x = torch.randn(2, 7, 32)
    for local in ({"example_inputs": (x,)}, {"leaves": (lambda m, p: p == "attn",)}):
        other = Schedule(tiny_model("gpt2"))
        other["transformer.h.0"].trace(flatten=True, **local)
        with pytest.raises(ScheduleError, match="cannot be written"):
            other.to_json()


def test_trace_of_the_full_model_keeps_its_outputs():
    model, plain = tiny_model("gpt2"), tiny_model("gpt2")
    sch = Schedule(model)
    sch.trace(flatten=True)
    assert sch.model is not model
    assert sch[""].mod is sch.model
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(outputs(sch.model, batch), outputs(plain, batch), rtol=0, atol=0)
    assert sch.model.get_input_embeddings() is sch.model.transformer.wte


def test_directive_on_a_module_inlined_by_a_trace_is_refused():
    sch = Schedule(tiny_model("gpt2"))
    sch[BLOCK].trace(flatten=True)
    with pytest.raises(ScheduleError, match=f"inlined into the graph of '{BLOCK}'"):
        sch[f"{BLOCK}.attn"].checkpoint()
    sch[f"{BLOCK}.attn.c_attn"].replace(nn.Linear(32, 96))  # a leaf: the graph calls it
    assert sch["transformer.h.0.attn"].checkpoint()


def test_trace_that_fails_leaves_the_model_unchanged():
    model = tiny_model("gpt2")
    model.transformer.h[1].mlp.act = DataDependent()
    modules = dict(model.named_modules())
    sch = Schedule(model)
    with pytest.raises(ScheduleError, match=r"leaves=\('mlp.act',\)") as caught:
        sch["transformer.h.*"].trace(flatten=True)
    assert caught.value.where == "transformer.h.1.mlp.act"
    assert dict(model.named_modules()) == modules
    assert not sch.history
    sch["transformer.h.*"].trace(flatten=True, leaves=("mlp.act",))
    with pytest.raises(ScheduleError, match="traced already"):
        sch[BLOCK].trace()


def test_shard_attribute_is_refused_when_a_trace_recorded_the_value():
    """A traced graph reshapes by the recorded number of heads, and would be silently wrong after the change."""
    sch = Schedule(tiny_model("gpt2"), Mesh(tp=2))
    sch[f"{BLOCK}.attn"].trace(flatten=True)
    with pytest.raises(ScheduleError, match="the graph was recorded with num_heads=4"):
        sch[f"{BLOCK}.attn"].shard_attribute("num_heads")


def test_trace_records_softmax_attention_as_one_graph_node():
    register_attention()
    model, plain = tiny_model("gpt2"), tiny_model("gpt2")
    model.set_attn_implementation(NAME)
    sch = Schedule(model)
    sch["transformer.h.*.attn"].core_attention(4)
    sch[BLOCK].trace(flatten=True)
    graph = sch[BLOCK].mod.graph
    (core,) = (n for n in graph.nodes if n.target == "attn.core_attn")
    assert len([n for n in core.all_input_nodes if n.op == "get_attr"]) == 1  # attention=attn
    sch["transformer.h.0.attn"].trace(flatten=True)
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(outputs(model, batch), outputs(plain, batch), rtol=0, atol=0)


class Sleepy(nn.Linear):
    """Linear with a bias that it makes, and a wait in which other ranks begin to trace."""

    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x) + torch.arange(x.shape[-1])


def traced_in_a_thread():
    sch = Schedule(nn.Sequential(Sleepy(3, 3)), Mesh(tp=4, rank=dist.get_rank()))
    sch["0"].trace(example_inputs=(torch.ones(2, 3),))
    return sch.model(torch.ones(5, 3)).shape


def test_ranks_that_are_threads_trace_in_turn_and_leave_torch_as_it_was(threads):
    functions = ((builtins, "isinstance"), (torch, "arange"), (nn.Module, "__call__"))
    before = [getattr(owner, name) for owner, name in functions]
    assert threads.run(traced_in_a_thread, 4) == [(5, 3)] * 4
    assert [getattr(owner, name) for owner, name in functions] == before


def column_row(seed):
    """Shard an MLP by columns and rows on two ranks, then decompose, trace and group it."""
    torch.manual_seed(seed)
    mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    net = nn.Sequential(mlp, nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    sch = Schedule(net, Mesh(tp=2, rank=dist.get_rank()))
    sch["0.0"].decompose()
    sch["0.0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["0.2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch["0"].trace(flatten=True, example_inputs=x)
    sch["0"].fuse("0|1", compiler=None)
    y = net(x)
    y.square().sum().backward()
    return y.detach(), x.grad, net[1].weight.grad


def test_module_traced_after_sharding_has_the_output_and_gradients_of_one_rank(ranks):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    y = net(x)
    y.square().sum().backward()
    for result in ranks.run(column_row, 2, 5):
        for mine, plain in zip(result, (y, x.grad, net[1].weight.grad), strict=True):
            torch.testing.assert_close(mine, plain.detach())


class DataDependent(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_trace_of_a_torch_module_with_example_inputs_keeps_its_output():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    sch = Schedule(net)
    x = torch.randn(3, 4)
    y = net(x)
    sch["0"].trace(example_inputs=x)
    torch.testing.assert_close(net(x), y, rtol=0, atol=0)


def test_trace_until_keeps_the_given_modules_as_untraced_leaves():
    sch = Schedule(tiny_model("gpt2"))
    sch.trace_until(["transformer.h.0", "transformer.h.1"])
    graph = sch["transformer"].mod.graph
    called = [n.target for n in graph.nodes if n.op == "call_module"]
    assert called == ["wte", "wpe", "drop", "h.0", "h.1", "ln_f"]
    assert not isinstance(sch["transformer.h.0"].mod, TracedModule)
    batch, plain = batch_for(sch.model, 3, 11), tiny_model("gpt2")
    torch.testing.assert_close(outputs(sch.model, batch), outputs(plain, batch), rtol=0, atol=0)
    again = Schedule(tiny_model("gpt2")).replay(from_json(sch.to_json()))
    assert str(again) == str(sch)
    with pytest.raises(ScheduleError, match=r"no module 'transformer.h.7' below this one"):
        Schedule(tiny_model("gpt2")).trace_until("transformer.h.7")


def test_find_traces_the_module_and_records_a_trace_directive():
    sch = Schedule(tiny_model("bert"))
    layer = sch["bert.encoder.layer.0"]
    found = layer.find("query|key|value")
    assert [path for path, _ in found] == ["bert.encoder.layer.0.attention.self"] * 3
    assert str(sch) == "sch['bert.encoder.layer.0'].trace()"
    assert [node.target for _, node in layer.find("dense")] == ["dense", "dense", "dense"]
    everywhere = sch["bert.encoder.layer.*"].find(lambda x, y: x + y)
    assert {s.path.split(".")[3] for s in everywhere} == {"0", "1"}
    with pytest.raises(ScheduleError, match="matches no module"):
        sch["bert.encoder.layer.9"].find("dense")
