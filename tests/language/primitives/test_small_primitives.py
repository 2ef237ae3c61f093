"""annotate, hook, pipeline_split, replace and replace_all of modules, and the registry."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import PRIMITIVES, Directive
from slapo_zoo.language.primitives.primitive_registry import list_primitives, register_primitive
from slapo_zoo.language.schedule import Schedule, from_json
from slapo_zoo.parallel.mesh import Mesh

NAMES = [
    "annotate",
    "checkpoint",
    "cut_pipeline_stage",
    "decompose",
    "fork_rng",
    "fuse",
    "hook",
    "pipeline_split",
    "replace",
    "replace_all",
    "shard",
    "sync",
    "trace",
    "trace_until",
]


def net():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.5), nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    )


def round_trip(sch, mesh=None):
    again = Schedule(net(), mesh).replay(from_json(sch.to_json()))
    assert str(again) == str(sch)
    return again


def test_attribute_set_by_annotate_stays_on_the_parameter_after_shard():
    sch = Schedule(net(), Mesh(tp=2, rank=1))
    sch["0"].annotate("weight", "foo", 7).shard("weight", 0)
    assert sch["0"].mod.weight.foo == 7
    assert sch["0"].mod.weight.shape == (3, 4)
    assert round_trip(sch, Mesh(tp=2)).model[0].weight.foo == 7
    with pytest.raises(ScheduleError, match=r"no parameter 'w'\n.*choose one of: weight, bias"):
        sch["0"].annotate("w", "foo", 7)
    with pytest.raises(ScheduleError, match="every torch tensor already has an attribute 'shape'"):
        sch["0"].annotate("weight", "shape", 7)


@pytest.mark.parametrize("prefix", ["fw", "fwd"])
def test_hook_directive_runs_functions_before_and_after_forward_and_backward(prefix):
    model, seen = net().eval(), []
    x = torch.randn(3, 4)
    plain = model(x)
    sch = Schedule(model)
    sch["0"].hook(f"{prefix}_pre", lambda m, args: (args[0] * 2,))
    sch["0"].hook(mode=f"{prefix}_post", func=lambda m, args, y: y - m.bias)
    sch["2"].hook(f"b{prefix[1:]}_post", lambda m, dx, dy: seen.append(dx[0].shape))
    y = model(x)
    torch.testing.assert_close(y, model[2](nn.functional.linear(x * 2, model[0].weight)))
    assert not torch.allclose(y, plain)
    y.sum().backward()
    assert seen == [(3, 6)]
    with pytest.raises(ScheduleError, match="a Python object, which JSON"):
        sch.to_json()
    with pytest.raises(ScheduleError, match="found mode 'pre'"):
        sch["0"].hook("pre", print)
    with pytest.raises(ScheduleError, match="expected a callable"):
        sch["0"].hook("fw_pre", "print")


def test_pipeline_split_records_the_same_cut_as_cut_pipeline_stage():
    sch, other = Schedule(net()), Schedule(net())
    sch["0"].pipeline_split()
    other["0"].cut_pipeline_stage()
    assert len(sch.state.cuts) == 1
    assert round_trip(sch).state.cuts == sch.state.cuts == other.state.cuts
    with pytest.raises(ScheduleError, match="a stage ends here already"):
        sch["0"].cut_pipeline_stage()
    with pytest.raises(ScheduleError, match="the whole model cannot be cut"):
        sch.pipeline_split()


def test_replace_with_a_module_installs_the_module_and_with_a_function_is_refused():
    model = net().eval()
    sch = Schedule(model)
    new = nn.Linear(4, 6)
    sch["0"].replace(new)
    assert model[0] is new
    assert not new.training
    model(torch.randn(3, 4)).sum().backward()
    assert new.weight.grad is not None
    with pytest.raises(ScheduleError, match="cannot be written"):
        sch.to_json()
    with pytest.raises(ScheduleError, match="is a function, not a module"):
        sch["0"].replace(torch.relu)
    with pytest.raises(ScheduleError, match="no kernel 'fast'"):
        sch["0"].replace("fast")


def test_replace_all_replaces_every_module_of_the_given_class():
    sch = Schedule(net())
    made = []

    def factory(path, module, bias=True):
        made.append(path)
        return nn.Linear(module.in_features, module.out_features, bias=bias)

    sch.replace_all(nn.Linear, factory, options=(("bias", False),))
    assert made == ["0", "2.0"]
    assert [n for n, _ in sch.model.named_parameters()] == ["0.weight", "2.0.weight"]
    sch["2"].replace_all("ReLU", lambda path, module: nn.Sequential(nn.ReLU()))
    assert isinstance(sch["2.1"].mod, nn.Sequential)
    sch.model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ScheduleError, match=r"no module of type 'Conv1d' below this one"):
        sch.replace_all("Conv1d", factory)
    with pytest.raises(ScheduleError, match="no kernel 'fast'"):
        sch.replace_all("ReLU", "fast")
    before = sch.model[0]
    with pytest.raises(
        ScheduleError, match="return a module"
    ):  # the second replacement fails: the first stays
        sch.replace_all(
            "Linear", lambda path, module: nn.Linear(4, 6) if module is before else None
        )
    assert sch.model[0] is before


def test_list_primitives_returns_every_primitive_and_each_has_a_docstring():
    assert set(NAMES) <= set(list_primitives())
    assert list_primitives(name_only=False)["shard"] is PRIMITIVES["shard"]
    shard = Schedule(net())["0"].shard
    assert "rewrite:" in (inspect.getdoc(shard) or "")
    assert list(inspect.signature(shard).parameters)[:2] == ["param_name", "axis"]
    for name in NAMES:
        assert "rewrite:" in (PRIMITIVES[name].__doc__ or ""), name


@pytest.fixture
def registered():
    before = set(PRIMITIVES)
    yield
    for name in set(PRIMITIVES) - before:
        del PRIMITIVES[name]


@pytest.mark.usefixtures("registered")
def test_directive_class_registered_by_a_user_becomes_a_schedule_method():
    @register_primitive()
    @dataclass(frozen=True)
    class Scale(Directive):
        name: ClassVar[str] = "scale"
        by: float

        def apply(self, site):
            site.module.weight.data *= self.by

    sch = Schedule(net())
    before = sch.model[0].weight.clone()
    sch["0"].scale(by=2.0)
    torch.testing.assert_close(sch.model[0].weight, before * 2)
    assert str(round_trip(sch)) == "sch['0'].scale(by=2.0)"
    with pytest.raises(ScheduleError, match="already registered"):
        register_primitive()(Scale)


@pytest.mark.usefixtures("registered")
def test_primitive_class_with_static_methods_registered_by_a_user_becomes_a_schedule_method():
    @register_primitive()
    class Halve:
        """Primitive of a third party that shards a linear layer over two ranks."""

        @staticmethod
        def name():
            return "halve"

        @staticmethod
        def apply(sch, axis, param_name="weight"):
            assert (sch.name, sch.path, sch.parent.path) == ("0", "2.0", "2")
            assert (sch.rank, sch.world_size) == (1, 2)
            sch.shard(param_name, axis=axis)
            assert sch.mod.weight.shape == (6, 2) or sch.mod.weight.shape == (2, 6)

    sch = Schedule(net(), Mesh(tp=2, rank=1))
    sch["2.0"].halve(0)
    assert str(sch) == "sch['2.0'].halve(args_0=0)"
    assert inspect.getdoc(sch["0"].halve) == (
        "Primitive of a third party that shards a linear layer over two ranks."
    )
    assert list(inspect.signature(sch["0"].halve).parameters) == ["axis", "param_name"]
    with pytest.raises(ScheduleError, match="that this program registered"):
        sch.to_json()
    for bad in (lambda: 0, type("Bad", (), {})):
        with pytest.raises(ScheduleError, match=r"expected a class|no static methods"):
            register_primitive()(bad)


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda sch: sch["0"].shard("weight", "0"), "axis: found '0', expected an integer"),
        (lambda sch: sch["0"].shard("weight", None), "axis: found None, expected an integer"),
        (lambda sch: sch["0"].shard(0, 0), "param_name: found 0, expected a string"),
        (lambda sch: sch["0"].shard("weight", 0, pad="yes"), "pad: found 'yes', expected True"),
        (lambda sch: sch["0"].sync(3), "mode: found 3, expected a string"),
        (lambda sch: sch["0"].shard("weight", 0, groups=3), "groups: found 3, expected a list"),
        (lambda sch: sch["0"].shard("weight", 0, unit=0), "found unit=0, together=1"),
        (
            lambda sch: sch["0"].shard_attribute("out_features", keep=0),
            "found unit=1, together=1, keep=0",
        ),
        (lambda sch: sch["0"].cut_pipeline_stage(call=-1), "found a negative call"),
        (lambda sch: sch["*"].mod, "mod: matches 3 modules"),
        (lambda sch: sch["3"].shard("weight", 1), "max_norm= of this Embedding needs"),
        (lambda sch: sch["1"].checkpoint(), "'1' is a second name of the module '0'"),
        (lambda sch: sch[2].shard("weight", 1).sync("fwd_post"), "unsharded bias of this Bilinear"),
    ],
)
def test_invalid_directive_argument_is_refused_with_its_reason(use, problem):
    twice = nn.Linear(4, 4)
    embedding = nn.Embedding(4, 4, max_norm=1.0)
    sch = Schedule(nn.Sequential(twice, twice, nn.Bilinear(4, 4, 4), embedding), Mesh(tp=2))
    with pytest.raises(ScheduleError) as caught:
        use(sch)
    assert problem in str(caught.value)
    assert len(sch.history) == ("Bilinear" in problem)


def test_directive_argument_of_wrong_type_in_json_raises():
    text = '{"format": "slapo-zoo-schedule/1", "steps": [["0", "shard", {"param_name": "weight", "axis": "0"}]]}'
    with pytest.raises(ScheduleError, match=r"step 0.*axis: found '0'"):
        from_json(text)


def test_directive_on_an_unknown_module_path_raises_and_names_the_nearest_paths():
    sch = Schedule(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ScheduleError, match=r"nearest paths: \['0'\]"):
        sch["zzz"].checkpoint()


class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("per_rank", [False, True])
def test_fork_rng_with_per_rank_draws_different_functional_dropout_on_each_rank(per_rank):
    masks = []
    for rank in (0, 1):
        sch = Schedule(nn.Sequential(Drops()), Mesh(tp=2, rank=rank, dry_run=True))
        sch["0"].fork_rng(per_rank=per_rank)
        masks.append(sch.model.train()(torch.ones(4, 50)))
    assert torch.equal(*masks) is not per_rank


HIDES = torch.ones(6, 6, dtype=torch.bool).tril()
FORMS = {
    "plain": {}, "causal": {"is_causal": True}, "hides": {"attn_mask": HIDES}, "scaled": {"scale": 0.3},
    "learned": {"attn_mask": torch.zeros(2, 1, 6, 6, requires_grad=True)},
}  # fmt: skip


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("form", FORMS)
def test_fork_rng_draws_sdpa_dropout_independently_of_the_other_samples_in_the_batch(form, heads):
    """At p = 1e-9 the result equals torch's; at p = 0.5 a row has the same mask in any batch."""
    attention, options, p = nn.functional.scaled_dot_product_attention, FORMS[form], [1e-9]
    shape = (2, 6, 8) if heads is None else (2, heads, 6, 8)
    if heads is None and form == "learned":
        options = {"attn_mask": torch.zeros(2, 6, 6, requires_grad=True)}

    class Attends(nn.Module):
        def forward(self, x):
            return attention(x, x, x, dropout_p=p[0], **options)

    sch = Schedule(nn.Sequential(Attends()))
    sch["0"].fork_rng()
    x, model = torch.randn(shape), sch.model.train()
    torch.testing.assert_close(model(x), attention(x, x, x, **options))
    before, p[0] = torch.get_rng_state(), 0.5
    with sch.state.random.at(0, 0, 2):
        whole = model(x)
    assert not torch.allclose(whole, attention(x, x, x, **options))
    if form != "learned":
        with sch.state.random.at(0, 1, 1):
            torch.testing.assert_close(model(x[1:]), whole[1:])
    assert torch.equal(before, torch.get_rng_state())


def test_shard_attribute_divides_a_config_value_for_one_module_only():
    """The model's config keeps its number of heads, and so do modules without a directive."""
    from types import SimpleNamespace

    model, config = net(), SimpleNamespace(heads=6, name="shared")
    model[0].config = model[1].config = config
    sch = Schedule(model, Mesh(tp=4, rank=1))
    sch["0"].shard_attribute("config.heads")
    assert (model[0].config.heads, model[0].config.name) == (2, "shared")
    assert model[1].config is config
    assert config.heads == 6
    with pytest.raises(ScheduleError, match=r"expected an integer attribute 'config.heads'"):
        sch["2"].shard_attribute("config.heads")
