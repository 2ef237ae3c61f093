"""The schedule language: selections, checks before changes, history, replay, and errors."""

import json

import pytest
import torch
from torch import nn

from slapo_zoo import Mesh, Schedule, ScheduleError
from slapo_zoo.dispatch.kernel_registry import register_kernel
from slapo_zoo.errors import MeshError
from slapo_zoo.language.directive import PRIMITIVES
from slapo_zoo.language.schedule import FORMAT, Selection, from_json

TP2 = Mesh(tp=2, rank=1)


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.num_heads = 4
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.zeros(width, width))

    def forward(self, x):
        return self.out(self.dropout(self.query(x)))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.attention, self.mlp = Attention(width), nn.Sequential(nn.Linear(width, 12), nn.ReLU())

    def forward(self, x):
        return self.mlp(self.attention(x))


class Model(nn.Module):
    """Model of two blocks, the second optionally narrower, with an embedding tied to a head."""

    def __init__(self, second=8):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(), Block(second)])
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight


def state_of(model):
    """Return all state that a directive could change, by value."""
    tensors = {n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items()}
    attributes = {}
    for path, module in model.named_modules():
        hooks = sum(len(v) for k, v in vars(module).items() if k.endswith("_hooks"))
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | tuple)}
        attributes[path] = (type(module), hooks, "forward" in vars(module), plain)
    return tensors, attributes


def same_state(a, b):
    (tensors, attributes), (others, other_attributes) = a, b
    assert attributes == other_attributes
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


# --- the view -----------------------------------------------------------------------------------


def test_schedule_indexing_selects_modules_by_path_and_by_child():
    model = Model()
    sch = Schedule(model)
    assert sch.mod is model
    assert sch.path == ""
    here = sch["layers.0.attention"]
    assert isinstance(here, Selection)
    assert here.path == "layers.0.attention"
    assert here.mod is model.layers[0].attention
    assert sch["layers"]["0"]["attention"].mod is here.mod
    assert list(here.child) == ["query", "out", "dropout"]
    assert here.child["query"].mod is model.layers[0].attention.query
    assert here.child["query"].path == "layers.0.attention.query"
    assert list(sch.child) == ["embed", "layers", "head"]
    assert "layers.0.attention" in sch
    assert "query" in here
    assert "query.weight" not in here
    assert "layers.2" not in sch
    assert sch["layers.*"].paths == ["layers.0", "layers.1"]
    assert sch["**:Linear"].paths == [n for n, m in model.named_modules() if type(m) is nn.Linear]
    assert sch["layers.*"]["mlp.*"].paths == [f"layers.{i}.mlp.{j}" for i in (0, 1) for j in (0, 1)]


def test_named_schedules_yields_the_paths_of_named_modules():
    model = Model()
    sch = Schedule(model)
    found = dict(sch.named_schedules())
    assert list(found) == [name for name, _ in model.named_modules()]
    assert all(found[name].mod is module for name, module in model.named_modules())
    below = dict(sch["layers.1"].named_schedules("here"))
    assert list(below)[:2] == ["here.layers.1", "here.layers.1.attention"]
    assert len(below) == 8
    assert not any("layers.0" in name for name in below)
    assert {*dict(sch["layers.*"].named_schedules())} == {n for n in found if "layers." in n}
    with pytest.raises(ScheduleError, match="nearest paths"):
        next(sch["layer.*"].named_schedules())


def test_misspelled_primitive_raises_and_names_the_nearest_method():
    here = Schedule(Model())["layers.0"]
    assert {*PRIMITIVES} <= {*dir(here)}
    assert here.shard.__doc__ == PRIMITIVES["shard"].__doc__
    with pytest.raises(AttributeError, match="no primitive 'shart'") as caught:
        _ = here.shart
    assert "'shard'" in str(caught.value)


def test_schedule_indexing_after_replace_selects_the_new_module():
    model = Model()
    sch = Schedule(model)
    new = nn.Sequential(nn.Linear(8, 8))
    sch["layers.0.attention"].replace(new)
    assert sch["layers.0.attention"].mod is model.layers[0].attention is new
    assert "layers.0.attention.0" in sch
    assert "layers.0.attention.query" not in sch


def test_module_that_replaces_a_sharded_and_checkpointed_one_has_no_directives_yet():
    sch = Schedule(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), Mesh(tp=2))
    for _ in range(2):
        sch["0"].replace(nn.Linear(4, 6))
        assert sch.state.placed == {}
        sch["0"].shard("weight", 0).shard("bias", 0).checkpoint()
        assert sch["0"].mod.weight.shape == (3, 4)
    sch["0"].replace(nn.Sequential(sch["0"].mod))  # the same tensors under other names
    assert sch.state.placed.keys() == {"0.0.weight", "0.0.bias"}
    assert sch.state.checkpointed == ["0"]  # its forward reads this


# --- check all, then apply ----------------------------------------------------------------------


def test_directive_that_fails_at_one_matched_module_changes_no_module():
    """The directive fits the first block and not the second, so neither is sharded."""
    model = Model(second=7)
    sch, before = Schedule(model, TP2), state_of(model)
    with pytest.raises(ScheduleError) as caught:
        sch["layers.*.attention.query"].shard("weight", 0)
    assert caught.value.where == "layers.1.attention.query"
    same_state(state_of(model), before)
    assert sch.history == []
    assert sch.state.placed == {}
    sch["layers.0.attention.query"].shard("weight", 0)
    assert model.layers[0].attention.query.weight.shape == (4, 8)


def test_failed_directive_leaves_earlier_directives_and_the_model_unchanged():
    model = Model()
    sch = Schedule(model, TP2)
    sch["embed"].shard("weight", 0, pad=True)
    before, text = state_of(model), str(sch)
    for bad in (
        lambda: sch["embed"].shard("weight", 0),
        lambda: sch["layers.*.attention"].shard_attribute("num_heads_of_it"),
        lambda: sch["**:Linear"].sync("fwd_past", "all_reduce"),
        lambda: sch["nothing.*"].checkpoint(),
    ):
        with pytest.raises(ScheduleError):
            bad()
        same_state(state_of(model), before)
        assert str(sch) == text


def test_tied_weights_stay_tied_after_shard_directives():
    model = Model()
    sch = Schedule(model, TP2)
    sch["embed"].shard("weight", 0, pad=True)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.shape == (6, 8)
    sch["head"].shard("weight", 0, pad=True)  # the same division through the tie: only sizes
    assert model.embed.weight is model.head.weight
    assert model.head.out_features == 6
    with pytest.raises(ScheduleError, match="is sharded already"):
        sch["head"].shard("weight", 0, pad=True)


# --- errors -------------------------------------------------------------------------------------

register_kernel("picky_kernel_of_tests", refuses=lambda module: "it has 3 legs")(lambda site: None)
ERRORS = {
    # pattern and directive, then where, problem and hint of the error
    "nearest": ("layer.*.attention", "checkpoint", (), {}, "layer.*.attention", "matches no module", "nearest paths: ['layers.1.attention', 'layers.0.attention'"),
    "class": ("**:Linnear", "checkpoint", (), {}, "**:Linnear", "matches no module", "nearest paths"),
    "tensor": ("head", "shard", ("wieght", 0), {}, "head", "no parameter or buffer 'wieght'", "choose one of: weight, bias"),
    "axis": ("head", "shard", ("weight", 2), {}, "head", "found axis 2, expected 0..1", "choose an axis of the shape (11, 8)"),
    "negative": ("head", "shard", ("weight", -1), {}, "head", "found axis -1, expected 0..1", "the shape"),
    "uneven": ("head", "shard", ("weight", 0), {}, "head", "axis 0 of 'weight': size 11 is not a multiple of mesh_dim tp=2", "pass uneven=True (ranks differ by one index) or pad=True"),
    "uneven group": ("head", "shard", ("weight", 0), {"groups": (5, 6)}, "head", "one of the groups (5, 6) is not a multiple of mesh_dim tp=2", "pass uneven=True (ranks differ by one index), or another tp"),
    "groups": ("layers.0.attention.query", "shard", ("weight", 0), {"groups": (4, 5)}, "layers.0.attention.query", "groups (4, 5) add up to 9", "legal sizes of tp: [1]"),
    "unit": ("layers.0.attention.query", "shard", ("weight", 0), {"unit": 8}, "layers.0.attention.query", "1 units of 8 cannot be sharded over tp=2", "legal sizes of tp: [1]"),
    "mode": ("head", "sync", ("fwd", "all_reduce"), {}, "head", "found mode 'fwd', expected one of ('fwd_pre', 'fwd_post', 'bwd_post')", "fwd_post: outputs"),
    "op": ("head", "sync", ("fwd_post", "all_to_some"), {}, "head", "no sync op 'all_to_some'", "'all_gather', 'all_reduce'"),
    "mode of op": ("head", "sync", ("fwd_pre", "all_reduce"), {}, "head", "'all_reduce' cannot run in mode 'fwd_pre'", "one of the modes ('fwd_post', 'bwd_post')"),
    "logits": ("head", "sync", ("fwd_post", "vocab_logits"), {}, "head", "the module's weight is not sharded", 'shard("weight", 0, pad=True) first'),
    "kernel": ("head", "replace", ("fast_linear",), {}, "head", "no kernel 'fast_linear'", "registered: ["),
    "refusal": ("head", "replace", ("picky_kernel_of_tests",), {}, "head", "it has 3 legs", "select only modules"),
    "root": ("", "replace", (nn.Linear(1, 1),), {}, "(the model)", "the root of the model cannot be replaced", "create a schedule of the new model instead"),
    "attribute": ("layers.0.attention", "shard_attribute", ("n_heads",), {}, "layers.0.attention", "'n_heads'", "name an int of the module"),
    "heads": ("layers.0.attention", "core_attention", (1,), {}, "layers.0.attention", "cannot be sharded over tp=2", "legal sizes of tp: "),
    "cut": ("", "cut_pipeline_stage", (), {}, "(the model)", "the whole model cannot be cut", "name one of its blocks"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_schedule_error_states_module_directive_problem_and_hint(name):
    pattern, primitive, args, options, where, problem, hint = ERRORS[name]
    model = Model()
    sch, before = Schedule(model, TP2), state_of(model)
    with pytest.raises(ScheduleError) as caught:
        getattr(sch[pattern], primitive)(*args, **options)
    error = caught.value
    assert error.where == where
    assert str(error.what).startswith(f"{primitive}(")
    assert problem in error.problem
    assert hint in error.hint
    assert str(error).startswith(f"{where}: {primitive}(")
    same_state(state_of(model), before)
    assert (sch.history, str(sch)) == ([], "")


def test_shard_or_checkpoint_applied_twice_to_a_module_raises():
    sch = Schedule(Model(), TP2)
    sch["layers.0.attention.query"].shard("weight", 0)
    with pytest.raises(ScheduleError, match=r"sharded already, by shard\(.*axis=0") as caught:
        sch["layers.*.attention.query"].shard("weight", 1)
    assert caught.value.where == "layers.0.attention.query"
    assert sch["layers.1.attention.query"].mod.weight.shape == (8, 8)
    sch["layers.0"].checkpoint()
    with pytest.raises(ScheduleError, match="checkpointed already"):
        sch["layers.0"].checkpoint()
    sch["layers.0"].cut_pipeline_stage()
    with pytest.raises(ScheduleError, match="a stage ends here already"):
        sch["layers.0"].cut_pipeline_stage()


def test_schedule_with_an_unknown_mesh_dim_is_refused():
    model = Model()
    before = state_of(model)
    with pytest.raises(MeshError, match=r"mesh_dim='ep'.*expected one of"):
        Schedule(model, TP2)["head"].shard("weight", 1, mesh_dim="ep")
    same_state(state_of(model), before)


# --- history, replay, JSON ----------------------------------------------------------------------


def program(sch):
    sch["embed"].shard("weight", 0, pad=True).sync("fwd_post", "all_reduce")
    sch["layers.*.attention"].shard_attribute("num_heads")
    sch["layers.*.attention.query"].shard("weight", 0, unit=2).shard("bias", 0, unit=2)
    sch["layers.*.mlp.0"].shard("weight", 0, groups=(4, 8)).shard("bias", 0, groups=(4, 8))
    sch["**:Dropout"].fork_rng()
    sch["layers.1"].checkpoint()
    sch["layers.0"].cut_pipeline_stage()
    return sch


def test_printed_schedule_is_python_code_that_recreates_the_schedule():
    sch = program(Schedule(Model(), TP2))
    lines = str(sch).splitlines()
    assert lines[0] == "sch['embed'].shard(param_name='weight', axis=0, pad=True)"
    assert lines[-1] == "sch['layers.0'].cut_pipeline_stage()"
    assert len(lines) == len(sch.history) == 10
    again = Schedule(Model(), TP2)
    for line in lines:  # the text is a program
        exec(line, {"sch": again})
    assert again.history == sch.history


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), TP2, Mesh(tp=2, pp=2, rank=3)])
def test_schedule_replayed_from_json_on_a_new_model_gives_equal_weights(mesh):
    torch.manual_seed(3)
    first = Model()
    second = Model()
    second.load_state_dict(first.state_dict())
    sch = program(Schedule(first, mesh))
    again = Schedule(second, mesh).replay(from_json(sch.to_json()))
    assert again.history == sch.history
    assert again.to_json() == sch.to_json()
    same_state(state_of(second), state_of(first))
    assert second.head.weight is second.embed.weight
    assert Schedule(Model(), mesh).replay(sch).history == sch.history


def test_schedule_diff_prints_added_and_removed_directives():
    a, b = program(Schedule(Model(), TP2)), program(Schedule(Model(), TP2))
    assert a.diff(b) == ""
    b["layers.0"].checkpoint()
    assert a.diff(b).splitlines()[-1] == "+sch['layers.0'].checkpoint()"
    assert b.diff(a).splitlines()[-1] == "-sch['layers.0'].checkpoint()"


def test_schedule_json_has_a_fixed_format_that_is_equal_on_every_rank():
    text = program(Schedule(Model(), TP2)).to_json()
    document = json.loads(text)
    assert document["format"] == FORMAT
    assert document["steps"][0] == [
        "embed",
        "shard",
        {"param_name": "weight", "axis": 0, "pad": True},
    ]
    assert text == program(Schedule(Model(), Mesh(tp=2, rank=0))).to_json()  # the same on each rank


def test_to_json_refuses_directives_that_hold_python_objects():
    """Directives with live objects run and are recorded; to_json names the line and the reason."""
    calls = []
    for use, why in (
        (lambda s: s["head"].replace(nn.Linear(8, 11)), "new=Linear("),
        (
            lambda s: s["head"].sync("fwd_post", lambda *a: calls.append(1)),
            "sync_op_or_fn=<function",
        ),
    ):
        model = Model()
        sch = Schedule(model)
        sch["layers.0"].checkpoint()
        use(sch)
        assert len(sch.history) == 2
        model.head(torch.zeros(1, 8))
        with pytest.raises(ScheduleError, match="cannot be written") as caught:
            sch.to_json()
        assert caught.value.where == "head"
        assert why in caught.value.problem
        assert "is a Python object, which JSON cannot hold" in caught.value.problem
        assert "registered name" in caught.value.hint
    assert calls == [1]


STEP = ["head", "checkpoint", {}]
BAD_JSON = {
    "no json": ("{", "Expecting property name"),
    "empty": ("", "Expecting value"),
    "list": ("[]", f"found format 'list', expected '{FORMAT}'"),
    "format": ({"format": "slapo-zoo-schedule/9", "steps": []}, "found format 'slapo-zoo-schedule/9'"),
    "no steps": ({"format": FORMAT}, "steps"),
    "steps": ({"format": FORMAT, "steps": {"head": 1}}, "steps"),
    "short": ({"format": FORMAT, "steps": [STEP, ["head", "checkpoint"]]}, "step 1"),
    "text": ({"format": FORMAT, "steps": ["head"]}, "step 0"),
    "pattern": ({"format": FORMAT, "steps": [[3, "checkpoint", {}]]}, "step 0"),
    "primitive": ({"format": FORMAT, "steps": [STEP, ["head", "explode", {}]]}, "no such primitive"),
    "odd name": ({"format": FORMAT, "steps": [["head", ["shard"], {}]]}, "step 0"),
    "argument": ({"format": FORMAT, "steps": [["head", "shard", {"axes": 0}]]}, "unknown arguments ['axes']"),
    "no argument": ({"format": FORMAT, "steps": [["head", "shard", {"axis": 0}]]}, "param_name"),
    "arguments": ({"format": FORMAT, "steps": [["head", "shard", [1]]]}, "step 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_JSON)
def test_invalid_schedule_json_error_names_the_step(name):
    document, problem = BAD_JSON[name]
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(ScheduleError) as caught:
        from_json(text)
    assert problem in str(caught.value)
    assert caught.value.hint
    assert caught.value.problem


def test_schedule_replay_stops_at_an_invalid_step_and_keeps_earlier_steps():
    """The steps before the invalid one stay applied; the invalid one changes nothing."""
    steps = [["embed", "shard", {"param_name": "weight", "axis": 1}], ["heda", "checkpoint", {}]]
    model = Model()
    sch = Schedule(model, TP2)
    with pytest.raises(ScheduleError, match=r"heda: checkpoint.*matches no module"):
        sch.replay(from_json(json.dumps({"format": FORMAT, "steps": steps})))
    assert len(sch.history) == 1
    assert model.embed.weight.shape == (11, 4)
