"""Directives on modules that users write: shared modules, groups, interfaces that are no tensor, second builds."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

from slapo_zoo import Mesh, Schedule, ScheduleError, build, create_schedule, emulate
from slapo_zoo.language.directive import Site
from slapo_zoo.language.primitives.shard import Shard
from slapo_zoo.language.primitives.sync import first_tensor

Pair = namedtuple("Pair", "left right")


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x):
        return self.act(self.linear(x))


def sharing():
    act = nn.ReLU()
    return nn.Sequential(*(Block(act) for _ in range(3)))


@pytest.mark.parametrize(
    "use",
    [
        lambda sch: sch.replace_all("ReLU", lambda path, module: nn.GELU()),
        lambda sch: sch["*.act"].replace(nn.GELU()),
        lambda sch: sch["0.act"].trace(example_inputs=torch.ones(2, 4)),
    ],
    ids=["replace_all", "replace", "trace"],
)
def test_module_that_several_modules_hold_is_replaced_in_all_of_them(use):
    sch = Schedule(sharing())
    before = sch["0.act"].mod
    use(sch)
    assert sch["0.act"].mod is not before
    assert all(block.act is sch["0.act"].mod for block in sch.model)


def fails_second():
    made = []

    def factory(path, module):
        made.append(path)
        return nn.GELU() if len(made) == 1 else None

    return factory


@pytest.mark.parametrize(
    ("make", "use", "problem"),
    [
        (lambda: nn.Sequential(Block(nn.ReLU()), Block(nn.ReLU())),
         lambda sch: sch["*:Block"].replace_all("ReLU", fails_second()), "return a module"),
        (sharing, lambda sch: sch["*.linear"].replace(nn.Linear(4, 4)), "would stand for 3 modules"),
        (lambda: nn.Sequential(sharing()), lambda sch: sch["0.**"].replace(nn.GELU()), "would stand for 7 modules"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), lambda sch: sch["0"].checkpoint(), "of torch.jit.script"),
        (lambda: nn.Sequential(nn.GroupNorm(1, 4)), lambda sch: sch["0"].shard("weight", 0), "1 groups of 4 channels"),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 1, groups=2)), lambda sch: Schedule(sch.model, Mesh(tp=4))["0"].shard("weight", 0),
         "2 groups of 2 channels"),
        (lambda: nn.Sequential(nn.EmbeddingBag(4, 4)), lambda sch: sch["0"].shard("weight", 0), "the sum of rows of this EmbeddingBag"),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), lambda sch: sch["0"].shard("weight_hh_l0", 0), "the recurrence of this LSTM"),
        (lambda: nn.MultiheadAttention(4, 2), lambda sch: sch["out_proj"].shard("weight", 1), "the attention of this"),
        (lambda: nn.Sequential(hooked(nn.Linear(4, 4))), lambda sch: sch["0"].shard("weight", 0), "a gradient hook of this"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), lambda sch: sch["0"].sync("bwd_post").sync("bwd_post"), "sums here already"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), lambda sch: sch["0"].shard("weight", 1).shard("bias", 0).sync("fwd_post"),
         "the bias is sharded, but the output is not"),
    ],
)  # fmt: skip
def test_directive_that_would_give_wrong_results_is_refused_and_changes_no_module(make, use, problem):  # fmt: skip
    sch = Schedule(make(), Mesh(tp=2))
    before = list(sch.model.modules())
    with pytest.raises(ScheduleError, match=problem):
        use(sch)
    assert all(a is b for a, b in zip(sch.model.modules(), before, strict=True))


def hooked(linear):
    linear.weight.register_hook(lambda grad: grad / 2)
    return linear


def test_shard_accepts_a_module_added_later_whose_parent_the_schedule_does_not_know():
    sch, added = Schedule(nn.Sequential(nn.Linear(4, 4)), Mesh(tp=2)), nn.Linear(4, 4)
    Shard("weight", 0).check(Site("0.adapters.first", added, sch.state))  # as adapters are sharded


def test_schedule_of_a_lazy_module_is_refused_until_it_has_run():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ScheduleError, match="has no shape yet"):
        Schedule(model)
    model(torch.ones(2, 3))
    assert Schedule(model)["0"].mod.in_features == 3


def test_module_names_with_a_colon_or_a_star_are_selected_literally():
    sch = Schedule(nn.ModuleDict({"a:b": nn.ReLU(), "c*": nn.ReLU(), "cd": nn.ReLU()}))
    assert sch["a:b"].paths == ["a:b"]
    assert sch["c*"].paths == ["c*"]


@pytest.mark.parametrize("own_attribute", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GroupNorm(4, 8),
        lambda: nn.Conv1d(8, 8, 3, groups=4),
        lambda: nn.ConvTranspose1d(8, 8, 3, groups=4),
        lambda: nn.InstanceNorm1d(8, affine=True),
    ],
    ids=["GroupNorm", "Conv1d", "ConvTranspose1d", "InstanceNorm1d"],
)
def test_sharded_grouped_convolutions_and_norms_compute_the_channels_of_the_unsharded_module(
    make, own_attribute
):
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 8, 5)
    nn.init.normal_(module.weight)
    outputs = []
    for rank in range(2):
        own = make()
        own.load_state_dict(module.state_dict())
        sch = Schedule(nn.Sequential(own), Mesh(tp=2, rank=rank))
        sch["0"].shard("weight", 0).shard("bias", 0)
        if own_attribute and isinstance(module, nn.GroupNorm):
            sch["0"].shard_attribute("num_groups")  # what users wrote before
        outputs.append(sch.model(x.chunk(2, 1)[rank]))
    torch.testing.assert_close(torch.cat(outputs, 1), module(x))


@pytest.mark.parametrize(
    ("args", "kwargs", "want"),
    [
        ((torch.tensor([True]), torch.ones(2)), {}, 1),
        ((torch.tensor([3]),), {"x": torch.ones(2)}, 1),
        (((None, torch.ones(2)), 3), {}, 0),
        (({"x": torch.ones(2)},), {}, 0),
        ((torch.tensor([3]),), {}, 0),
        ((None,), {"n": 2}, None),
    ],
)
def test_sync_takes_the_first_floating_point_tensor_among_nested_arguments(args, kwargs, want):
    seen = []
    first_tensor(lambda x: seen.append(x) or x, args, kwargs)
    given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
    assert [x is given[want] for x in seen] == ([] if want is None else [True])


class Returns(nn.Module):
    """Row-parallel linear whose result lies within another object."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4, bias=False), wrap

    def forward(self, x):
        return self.wrap(self.linear(x))


def summed(wrap, unwrap, weight):
    model = Returns(wrap)
    model.linear.weight = nn.Parameter(weight.clone())
    sch = create_schedule(model)
    sch["linear"].shard("weight", 1)
    sch.sync("fwd_post", "all_reduce")
    x = torch.arange(8.0).view(2, 4).chunk(2, 1)[sch.mesh.rank]
    return unwrap(build(sch)(x)).detach()


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: Pair(y, 3), lambda out: out.left),
        (lambda y: {"n": 3, "y": y}, lambda out: out["y"]),
        (lambda y: (torch.tensor(1), (None, y)), lambda out: out[1][1]),
    ],
    ids=["namedtuple", "dict", "nested"],
)
def test_sync_of_an_output_sums_the_tensor_inside_and_keeps_its_container(wrap, unwrap):
    weight = torch.randn(4, 4)
    want = torch.arange(8.0).view(2, 4) @ weight.T
    for found in emulate(summed, wrap, unwrap, weight, mesh=(2, 1, 1)):
        torch.testing.assert_close(found, want)


def test_sync_of_an_output_without_tensors_is_refused():
    sch = Schedule(nn.Sequential(Returns(lambda y: object())), Mesh(tp=2, dry_run=True))
    sch["0"].sync("fwd_post", "all_reduce")
    with pytest.raises(ScheduleError, match="found no tensor in the module's output, a object"):
        sch.model(torch.ones(2, 4))


def test_collective_shared_by_siblings_in_a_module_dict_keeps_no_input_after_the_forward():
    model = nn.Sequential(nn.ModuleDict({name: nn.Linear(4, 4) for name in "qk"}))
    model.forward = lambda x: model[0]["q"](x) + model[0]["k"](x)
    sch = Schedule(model, Mesh(tp=2, dry_run=True))
    sch["0.*"].shard("weight", 0).shard("bias", 0).sync("bwd_post", shared=True)
    (kept,) = sch.state.shared.values()
    model(torch.ones(2, 4))
    assert kept == []


def twice_built():
    model = nn.Sequential(nn.PReLU())
    sch = create_schedule(model)
    build(sch)
    sch["0"].sum_gradient("weight")
    build(build(sch) and sch)(torch.full((1,), -1.0 - sch.mesh.rank)).sum().backward()
    return float(model[0].weight.grad)


def test_second_build_sums_gradients_of_directives_added_after_the_first_build():
    assert emulate(twice_built, mesh=(2, 1, 1)) == [-3.0, -3.0]


def copied():
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.PReLU()), nn.Linear(4, 4))
    sch = create_schedule(model)
    sch["1"].shard("weight", 1).sync("fwd_post").checkpoint()
    sch["0.act"].sum_gradient("weight")
    sch["0"].hook("fw_post", lambda module, args, y: y.chunk(2, -1)[sch.mesh.rank])
    built = build(sch)
    again = copy.deepcopy(copy.deepcopy(built))
    x = torch.arange(8.0).view(2, 4)
    grads = []
    for each in (built, again):
        each(x).sin().sum().backward()
        grads.append([p.grad for p in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        again[1].weight.zero_()
        assert torch.equal(again(x), again[1].bias.expand(2, 4))
        assert not torch.equal(built(x), again(x))


def test_deep_copy_of_a_traced_and_recomputed_module_computes_with_its_own_weights():
    sch = Schedule(Block(nn.Tanh()))
    sch["linear"].checkpoint()
    sch.trace(example_inputs=torch.ones(2, 4))
    again = copy.deepcopy(build(sch)).train()
    with torch.no_grad():
        again.linear.weight.zero_()
    assert torch.equal(again(torch.ones(1, 4)), again.linear.bias.tanh()[None])


@pytest.mark.filterwarnings("ignore::slapo_zoo.model.missing_sums.ScheduleWarning")
def test_deep_copy_of_a_module_built_from_a_schedule_computes_with_its_own_weights_and_sums_its_gradients():
    emulate(copied, mesh=(2, 1, 1))


def test_shard_on_one_rank_keeps_the_parameter_that_an_optimizer_holds():
    linear = hooked(nn.Linear(4, 4))
    weight = linear.weight
    Schedule(nn.Sequential(linear))["0"].shard("weight", 0)
    assert linear.weight is weight
