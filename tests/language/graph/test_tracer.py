"""Traces: exact on other sizes too; an error where the tracer would have to guess."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_zoo import is_module_list
from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph.examples import capture
from slapo_zoo.language.graph.trace import trace, trace_module, trace_tree
from slapo_zoo.language.graph.traced import TracedModule
from tiny_models import MODELS, batch_for, call_of, shared_model, tiny_model


def tensors(output):
    """All tensors of an output, in order."""
    items = tuple(output.values()) if hasattr(output, "values") else output
    return [x for x in tree_leaves(items) if isinstance(x, torch.Tensor)]


def assert_exact(mine, theirs):
    a, b = tensors(mine), tensors(theirs)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "tree"])
@pytest.mark.parametrize("part", ["attention", "block"])
@pytest.mark.parametrize("family", MODELS)
def test_traced_module_equals_the_untraced_module_on_another_input_size(family, part, flatten):
    model = shared_model(family)
    path = MODELS[family][2 if part == "attention" else 3]
    if not path:
        pytest.skip("it has no attention")
    args, kwargs = capture(model, path)
    module = model.get_submodule(path)
    if flatten:
        traced = trace_module(module, args, kwargs, flatten=True, where=path)
    else:
        traced = trace_tree(module, args, kwargs, where=path)[""]
    args, kwargs, output = call_of(model, path, batch_for(model, 3, 11))
    assert_exact((traced(*args, **kwargs),), (output,))
    assert module is model.get_submodule(path)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", MODELS)
def test_traced_model_equals_the_untraced_model_with_a_padding_mask(family):
    model = shared_model(family)
    args, kwargs = capture(model, "")
    traced = trace_module(model, args, kwargs, flatten=True)
    for rows, tokens in ((3, 11), (1, 9)):
        batch = batch_for(model, rows, tokens)
        assert_exact(traced(**batch), model(**batch))
    assert list(traced.state_dict()) == list(model.state_dict())
    assert [n for n, _ in traced.named_modules()] == [n for n, _ in model.named_modules()]


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "opt", "llama"])
def test_model_traced_in_eval_mode_has_dropout_and_gradients_of_the_untraced_model_in_train_mode(
    family,
):
    """The model is traced in eval mode; in train mode its dropout and gradients equal the plain model's."""
    model = tiny_model(family)
    traced = trace_module(model, *capture(model, ""), flatten=True)
    batch = batch_for(model, 3, 11)
    grads = {}
    for name, m in (("plain", model), ("traced", traced)):
        m.train()
        torch.manual_seed(3)
        out = tensors(m(**batch))
        sum(x.float().square().mean() for x in out if x.requires_grad).backward()
        grads[name] = [p.grad.clone() for p in m.parameters() if p.grad is not None], out
        m.zero_grad()
    assert_exact(grads["traced"], grads["plain"])
    assert len(grads["plain"][0]) > 5
    model.eval(), traced.eval()
    assert_exact(traced(**batch), model(**batch))


def test_trace_keeps_module_paths_and_the_identity_of_parameters():
    model = tiny_model("bert")
    before = dict(model.named_parameters())
    layers = model.bert.encoder.layer
    top = trace(model, example_kwargs=capture(model, "")[1])
    assert isinstance(top.bert.encoder.layer[1].attention.self, TracedModule)
    assert {n: id(p) for n, p in top.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert is_module_list(top.bert.encoder.layer)
    assert not is_module_list(top.bert)
    assert top.bert.encoder.layer is layers  # the container itself is the same object
    reference = tiny_model("bert")
    batch = batch_for(reference, 3, 11)
    assert_exact(top(**batch), reference(**batch))
    twin = copy.deepcopy(top)
    assert_exact(twin(**batch), reference(**batch))
    assert twin.bert.encoder.layer[0].attention.self.query is not layers[0].attention.self.query


def test_module_traced_on_meta_runs_on_real_tensors_with_equal_output():
    with torch.device("meta"):
        meta = tiny_model("gpt2")
    args, kwargs = capture(meta, "transformer.h.1")
    traced = trace_module(meta.transformer.h[1], args, kwargs, flatten=True).to_empty(device="cpu")
    model = shared_model("gpt2")
    traced.load_state_dict(model.transformer.h[1].state_dict())
    args, kwargs, output = call_of(model, "transformer.h.1", batch_for(model, 3, 11))
    assert_exact((traced(*args, **kwargs),), (output,))


class Odd(nn.Module):
    """Module with one forward for each way in which a trace fails."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.inner = nn.Identity() if how != "inner" else Odd("data")
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, flag=None, **kwargs):
        y = getattr(self, f"_{self.how}", lambda y, x, flag: y)(self.linear(x), x, flag)
        return self.inner(y)

    def _data(self, y, x, flag):
        return y + 1 if y.sum() > 0 else y

    def _item(self, y, x, flag):
        return y * (1 if int(y.sum().item()) > 0 else 2)

    def _nonzero(self, y, x, flag):
        return y if len(y.nonzero()) > 3 else y * 2

    def _store(self, y, x, flag):
        self.cache = y
        return y

    def _function(self, y, x, flag):
        return Doubled.apply(y)

    def _shape(self, y, x, flag):
        return y + 1 if x.shape[1] > 2 else y

    def _flag(self, y, x, flag):
        return y if flag is None else y * flag

    def _random(self, y, x, flag):
        return y * 2 if torch.rand([]) < 0.5 else y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("data", "reads the elements of a tensor"),
        ("item", "reads the elements of a tensor"),
        ("nonzero", "reads the elements of a tensor"),
        ("random", "reads the elements of a tensor"),
        ("store", r"stores a result in self\.cache"),
        ("function", "calls the autograd function Doubled"),
    ],
)
def test_untraceable_forward_raises_with_its_cause_and_source_line(how, cause):
    module = Odd(how)
    patched = (torch.arange, torch.rand, isinstance, nn.Module.__setattr__, nn.Module.__call__)
    draws = torch.get_rng_state()
    with pytest.raises(ScheduleError, match=cause) as caught:
        trace_module(module, (torch.ones(2, 3, 4),), flatten=True, where="h.3")
    assert "h.3" in str(caught.value)
    assert "test_tracer.py:" in str(caught.value)
    assert (torch.arange, torch.rand, isinstance) == patched[:3]
    assert (nn.Module.__setattr__, nn.Module.__call__) == patched[3:]
    assert torch.equal(draws, torch.get_rng_state())
    assert set(module.__dict__) == set(Odd("").__dict__)


def test_trace_error_names_an_inner_module_that_traces_when_declared_a_leaf():
    module, x = Odd("inner"), torch.ones(2, 3, 4)
    with pytest.raises(ScheduleError, match=r"leaves=\('inner',\)") as caught:
        trace_module(module, (x,), flatten=True, where="h.3")
    assert caught.value.where == "h.3.inner"
    for leaf in ("inner", lambda m, path: path == "inner"):
        assert_exact((trace_module(module, (x,), leaves=(leaf,), flatten=True)(x),), (module(x),))


def test_traced_module_raises_when_a_branch_on_a_tensor_size_changes():
    traced = trace_module(Odd("shape"), (torch.ones(2, 3, 4),))
    assert_exact((traced(torch.ones(5, 7, 4)),), (traced(torch.ones(5, 7, 4)),))
    with pytest.raises(ScheduleError, match="was True during the trace, this call has False"):
        traced(torch.ones(2, 2, 4))


def test_traced_module_raises_when_none_or_literal_arguments_change():
    x = torch.ones(2, 3, 4)
    traced = trace_module(Odd("flag"), (x,))
    assert_exact((traced(x, None),), (traced(x),))
    with pytest.raises(ScheduleError, match="argument 'flag' was None during the trace"):
        traced(x, x)
    with pytest.raises(ScheduleError, match=r"has the keyword arguments \['extra'\]"):
        traced(x, extra=1)
    with pytest.raises(ScheduleError, match="'flag' was given during the trace"):
        trace_module(Odd("flag"), (x, x))(x)
    with pytest.raises(ScheduleError, match="argument 'flag' is a object"):
        trace_module(Odd("flag"), (x, object()))
    with pytest.raises(ScheduleError, match="missing a required argument"):
        trace_module(Odd("flag"), ())


def test_trace_leaves_buffers_and_training_modes_unchanged():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    net[1].eval()
    traced = trace_module(net, (torch.rand(2, 3, 5, 5),), flatten=True)
    assert float(net[1].num_batches_tracked) == 0
    assert net.training
    assert not net[1].training
    assert traced.get_submodule("1") is net[1]


def test_trace_keeps_a_module_with_patched_forward_or_hooks_as_a_leaf():
    net = nn.Sequential(Odd(""), Odd(""))
    net[0].forward = net[0].forward  # an instance attribute, as checkpoint and fork_rng set it
    net[1].register_forward_hook(lambda m, args, y: y * 3)  # as sync does
    x = torch.ones(2, 3, 4)
    traced = trace_module(net, (x,), flatten=True)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1"]
    assert_exact((traced(x),), (net(x),))
    with pytest.raises(ScheduleError, match=r"call trace\(\) before that directive"):
        trace_module(net[0], (x,))
    with pytest.raises(ScheduleError, match="traced already"):
        trace_module(traced, (x,))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_traced_model_converted_to_another_dtype_equals_the_untraced_model(family):
    """The model is traced in float32 and runs in bfloat16, under autocast and under torch.compile."""
    model = tiny_model(family)
    traced = trace_module(model, *capture(model, ""), flatten=True)
    batch = batch_for(model, 3, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_exact(traced(**batch), model(**batch))
    model.to(torch.bfloat16)  # the parameters are shared
    assert_exact(traced(**batch), model(**batch))
    if family == "gpt2":
        compiled = torch.compile(traced, backend="eager", fullgraph=True)
        assert_exact(compiled(**batch), model(**batch))


def test_traced_module_raises_when_a_branch_on_a_dtype_changes():
    model = tiny_model("t5")
    traced = trace_module(model, *capture(model, ""), flatten=True)
    batch = batch_for(model, 3, 11)
    model.to(torch.bfloat16)
    with pytest.raises(ScheduleError, match=r"eq_\d at modeling_t5.py:\d+ was False"):
        traced(**batch)
