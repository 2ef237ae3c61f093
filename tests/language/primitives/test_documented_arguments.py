"""Calls of the original Slapo's documents, as they show them; and extensions by third parties."""

import copy
import inspect
import pydoc
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import slapo_zoo
from slapo_zoo import Mesh, Schedule, ScheduleError
from slapo_zoo.language.directive import PRIMITIVES, Directive
from slapo_zoo.language.primitives.shard import SHARD_RULES
from slapo_zoo.language.primitives.sync import SYNC_OPS
from slapo_zoo.language.schedule import from_json
from slapo_zoo.parallel import collectives
from tiny_models import assert_same_step, tiny_model

LAYER = "bert.encoder.layer.0"


def bert():
    return slapo_zoo.create_schedule(tiny_model("bert"))


def gelu(x):
    return functional.gelu(x)


def traced():
    sch = bert()
    s = sch[f"{LAYER}.intermediate"]
    s.trace(leaves=[], flatten=True)
    return sch, s


# --- the two tables of primitives ----------------------------------------------------------------


def test_replace_accepts_the_module_as_the_documented_keyword_new():
    sch = bert()
    sch[f"{LAYER}.intermediate.intermediate_act_fn"].replace(new=nn.GELU())
    assert_same_step(slapo_zoo.build(sch), tiny_model("bert"))


def test_shard_accepts_the_documented_keywords_param_name_and_axis():
    s = slapo_zoo.create_schedule(nn.Sequential(nn.Linear(4, 6)), mesh=Mesh(tp=2))["0"]
    s.shard(param_name="weight", axis=0)
    s.shard("bias", axis=0)
    assert s.mod.weight.shape == (3, 4)


def test_sync_accepts_the_documented_modes_ops_and_keywords():
    sch = slapo_zoo.create_schedule(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    sch["0"].sync(mode="fwd_pre", sync_op_or_fn="all_gather", axis=1)
    sch["0"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1, tensor_parallel_output_grad=False)  # fmt: skip
    sch["0"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")
    sch["1"].sync("fwd_post", sync_op_or_fn=lambda module, args, y: y + 1)
    assert len(sch.history) == 4


def older_modes(x):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4, bias=False)))  # fmt: skip
    sch = slapo_zoo.create_schedule(net, mesh=Mesh(tp=2, rank=dist.get_rank()))
    sch["1.0"].shard("weight", 0).shard("bias", 0)
    sch["1.1"].shard("weight", 1)
    sch["1"].sync(mode="both")
    y = net(x)
    y.square().sum().backward()
    return y.detach(), net[0].weight.grad


def test_sync_with_older_mode_names_has_the_output_and_gradient_of_one_rank(ranks):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4, bias=False)))  # fmt: skip
    x = torch.randn(3, 4)
    y = net(x)
    y.square().sum().backward()
    for found, grad in ranks.run(older_modes, 2, x):
        torch.testing.assert_close(found, y.detach())
        torch.testing.assert_close(grad, net[0].weight.grad)
    sch = Schedule(net, Mesh(tp=2))
    sch["1"].sync(mode="forward").sync(mode="backward")
    assert [d.mode for _, d in sch.history] == ["fwd_post", "bwd_post"]


def test_checkpoint_fork_rng_annotate_and_hook_accept_their_documented_arguments():
    sch = bert()
    sch[LAYER].checkpoint()
    sch[f"{LAYER}.output.dropout"].fork_rng()
    sch[f"{LAYER}.output.dense"].annotate(param_name="weight", key="note", value=1)
    sch[LAYER].hook(mode="fw_post", func=lambda module, args, y: y)
    sch[LAYER].hook(mode="fw_pre", func=lambda module, args: args)
    sch[LAYER].hook(mode="bw_post", func=lambda module, dx, dy: dx)
    sch.model.eval()
    assert len(sch.history) == 6


def test_trace_find_and_fuse_with_documented_arguments_keep_outputs_and_gradients():
    sch, s = traced()
    subgraph = s.find(gelu)
    s.fuse(compiler="TorchScript", subgraph=subgraph)
    assert_same_step(sch.model, tiny_model("bert"))
    sch, s = traced()
    s.fuse("TorchScript", s.find(gelu))  # the order of the table
    assert "FusedModule_0" in s.child
    assert [node.target for _, node in s.find("dense")] == ["dense"]


def test_find_with_a_path_pattern_searches_only_modules_of_matching_path():
    sch = bert()
    found = sch["bert.encoder"].find("layer.*.intermediate", gelu)
    assert [s.path for s in found] == [f"bert.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in (0, 1)]  # fmt: skip
    with pytest.raises(ScheduleError, match="matches no module"):
        sch["bert.encoder"].find("layer.*.nothing", gelu)


def test_replace_checkpoint_and_decompose_of_a_subgraph_keep_gradients():
    sch, s = traced()
    s.replace(nn.GELU(), s.find(gelu))
    s.checkpoint("dense")
    assert_same_step(sch.model, tiny_model("bert"))
    sch, s = traced()
    s.replace(gelu, target_ops=s.find(gelu), name="Other", concrete_args=None)
    sch["bert.encoder.layer.1.output.dense"].decompose()
    assert_same_step(sch.model, tiny_model("bert"))


def test_pipeline_split_and_cut_pipeline_stage_each_add_one_pipeline_cut():
    sch = bert()
    sch[LAYER].cut_pipeline_stage()
    sch["bert.encoder.layer.1"].pipeline_split()
    assert len(sch.state.cuts) == 2


def test_replace_all_passes_keywords_to_the_module_factory():
    sch = slapo_zoo.create_schedule(nn.Sequential(nn.ReLU(), nn.ReLU()))
    sch.replace_all(nn.ReLU, lambda path, module, slope: nn.LeakyReLU(slope), slope=0.3)
    assert [m.negative_slope for m in sch.model] == [0.3, 0.3]
    assert "options=(('slope', 0.3),)" in str(sch)


def test_wrong_directive_argument_raises_and_shows_the_signature():
    sch = slapo_zoo.create_schedule(nn.Sequential(nn.Linear(4, 6)))
    with pytest.raises(ScheduleError, match=r"0: shard: shard\(\) got an unexpected") as caught:
        sch["0"].shard("weight", axes=0)
    assert caught.value.hint.startswith("call shard(param_name: str, axis: int, ")
    with pytest.raises(ScheduleError, match="missing 1 required positional argument: 'axis'"):
        sch["0"].shard("weight")


def test_every_listed_primitive_has_a_docstring_that_shows_its_rewrite():
    assert set(slapo_zoo.list_primitives()) >= {"shard", "sync", "trace", "fuse", "decompose"}
    assert slapo_zoo.list_primitives(name_only=False)["shard"] is PRIMITIVES["shard"]
    page = pydoc.plain(pydoc.render_doc(bert()["bert"].shard))
    for expected in ("shard(param_name: str, axis: int", "rewrite:", "errors:", "source:"):
        assert expected in page
    for name in slapo_zoo.list_primitives():
        if PRIMITIVES[name].__module__.startswith("slapo_zoo."):
            page = pydoc.plain(pydoc.render_doc(getattr(bert()["bert"], name)))
            assert "rewrite:" in page, name


# --- sharding rules ------------------------------------------------------------------------------


def convolutions(axes):
    """Column-parallel, grouped and row-parallel convolutions over `axes` axes; the grouped one has two outputs a channel."""
    cls = getattr(nn, f"Conv{axes}d")
    return nn.Sequential(cls(4, 6, 3), nn.ReLU(), cls(6, 12, 1, groups=6), cls(12, 3, 1))


def row_convolution(plain, x):
    net = copy.deepcopy(plain)
    sch = Schedule(net, Mesh(tp=2, rank=dist.get_rank()))
    sch["0"].sync("bwd_post", "all_reduce")
    for name in ("0", "2"):
        sch[name].shard("weight", 0).shard("bias", 0)
    sch["3"].shard("weight", 1).sync("fwd_post", "all_reduce")
    x = x.clone().requires_grad_()
    y = slapo_zoo.build(sch)(x)
    y.square().sum().backward()
    return y.detach(), x.grad, net[3].bias.grad


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_row_parallel_convolution_adds_its_bias_once_after_the_all_reduce(axes, threads):
    net, x = convolutions(axes), torch.randn(2, 4, *[4] * axes, requires_grad=True)
    y = net(x)
    y.square().sum().backward()
    for found in threads.run(row_convolution, 2, net, x.detach()):
        for mine, want in zip(found, (y.detach(), x.grad, net[3].bias.grad), strict=True):
            torch.testing.assert_close(mine, want)


SIZES = {
    "Linear": (lambda: nn.Linear(4, 6), 0, "out_features", 3),
    "Embedding": (lambda: nn.Embedding(6, 4), 1, "embedding_dim", 2),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), 0, "out_channels", 3),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3), 1, "in_channels", 2),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), 0, "num_features", 3),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), 0, "num_features", 3),
    "LayerNorm": (lambda: nn.LayerNorm(6), 0, "normalized_shape", (3,)),
    "RMSNorm": (lambda: nn.RMSNorm(6), 0, "normalized_shape", (3,)),
}


@pytest.mark.parametrize("name", SIZES)
def test_shard_updates_only_the_module_attribute_that_holds_the_size_of_the_axis(name):
    make, axis, attribute, size = SIZES[name]
    sch = Schedule(nn.Sequential(make()), Mesh(tp=2))
    before = {k: v for k, v in vars(sch["0"].mod).items() if isinstance(v, int | tuple)}
    sch["0"].shard("weight", axis)
    after = {k: v for k, v in vars(sch["0"].mod).items() if isinstance(v, int | tuple)}
    assert after == before | {attribute: size}


# --- a third party -------------------------------------------------------------------------------


@pytest.fixture
def registries():
    """Remove what a test registers after the test."""
    tables = (PRIMITIVES, SYNC_OPS, SHARD_RULES)
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


@pytest.mark.usefixtures("registries")
def test_decorator_register_primitive_adds_a_schedule_method():
    @slapo_zoo.register_primitive()
    @dataclass(frozen=True)
    class Scale(Directive):
        """Multiply the weight."""

        name: ClassVar[str] = "scale_of_tests"
        by: float

        def apply(self, site):
            site.module.weight.data *= self.by

    sch = Schedule(nn.Sequential(nn.Linear(2, 2)))
    sch["0"].scale_of_tests(by=0.5)
    assert "scale_of_tests" in slapo_zoo.list_primitives()
    assert inspect.getdoc(sch["0"].scale_of_tests) == "Multiply the weight."
    again = Schedule(nn.Sequential(nn.Linear(2, 2))).replay(from_json(sch.to_json()))
    assert str(again) == "sch['0'].scale_of_tests(by=0.5)"


@pytest.mark.usefixtures("registries")
def test_decorator_shard_rule_makes_shard_accept_a_user_module_class():
    seen = []

    @slapo_zoo.shard_rule(
        lambda site, name, directive, runs: seen.append((site.path, name, runs)),
        table={0: "rows", 1: "columns"},
    )
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.columns = 6, 4
            self.table = nn.Parameter(torch.zeros(6, 4))

    sch = Schedule(nn.Sequential(Table()), Mesh(tp=2, rank=1))
    sch["0"].shard("table", 0)
    assert (sch["0"].mod.rows, sch["0"].mod.columns) == (3, 4)
    assert seen == [("0", "table", [(3, 6)])]


def mean_over_ranks(x):
    """Register a sync op and use it on every rank."""
    if "mean_of_tests" not in SYNC_OPS:

        @slapo_zoo.sync_op("mean_of_tests", "fwd_post")
        def _mean(x, sync, site):
            return collectives.reduce_forward(x, site.group(sync)) / site.mesh.tp

    sch = Schedule(nn.Sequential(nn.Identity()), Mesh(tp=2, rank=dist.get_rank()))
    sch["0"].sync("fwd_post", "mean_of_tests")
    explained = sch.explain({"input": x}).transfers
    return sch.model(x + dist.get_rank()), [(t.kind, t.bytes, t.path) for t in explained]


def test_decorator_sync_op_makes_sync_accept_the_new_op(ranks):
    for y, explained in ranks.run(mean_over_ranks, 2, torch.ones(3, 2)):
        assert torch.equal(y, torch.full((3, 2), 1.5))
        assert explained == [("all_reduce", 24, "0")]  # explain lists its communication too


@pytest.mark.usefixtures("registries")
def test_duplicate_sync_op_name_is_refused():
    with pytest.raises(ScheduleError, match="already registered"):
        slapo_zoo.sync_op("all_reduce", "fwd_post")(lambda x, sync, site: x)
