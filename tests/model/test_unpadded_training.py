"""The encoder without padding: models that hooks, patches or recomputation read get the plain model's numbers."""

import functools

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.utils.checkpoint import checkpoint as recompute

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.kernels import unpadded_encoder

CASES = {name: Case(f"{family}For{head}", (labels,), (("num_labels", 3),)) for family in ("Bert", "Roberta", "Albert")
         for head, labels in (("MaskedLM", "tokens"), ("TokenClassification", "tags"))
         for name in [f"{family}-{labels}".lower()]}  # fmt: skip
LAYOUTS = {"1": ((1, 1, 1), {}), "tp2": ((2, 1, 1), {}), "dp2": ((1, 1, 2), {}), "rows": ((1, 1, 2), {"dp_shard": 2})}  # fmt: skip
KERNELS = ["unpadded_encoder"]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("padding")


@pytest.fixture
def packed(monkeypatch):
    """Record the calls of layers that ran on real tokens alone."""
    calls, kernel = [], unpadded_encoder.unpadded
    monkeypatch.setattr(unpadded_encoder, "unpadded", lambda *a: calls.append(1) or kernel(*a))
    return calls


def parts(model):
    """Return the backbone, the first module that its encoder runs, and the head."""
    backbone = getattr(model, model.base_model_prefix)
    encoder = backbone.encoder
    layer = encoder.albert_layer_groups[0] if hasattr(encoder, "albert_layer_groups") else encoder.layer[0]  # fmt: skip
    return backbone, encoder, layer


def another_attention(model, seen):
    model.set_attn_implementation("eager")


def hook_on_a_layer(model, seen):
    def see(_module, _args, out):
        seen.append((out if torch.is_tensor(out) else out[0]).detach())

    parts(model)[2].register_forward_hook(see)


def hook_on_the_backbone(model, seen):
    hook = lambda _module, _args, out: seen.append(out[0].detach())  # noqa: E731
    parts(model)[0].register_forward_hook(hook)


def hook_on_all_modules(model, seen):
    """Register a global module hook of torch, which the test removes."""
    hook = lambda _module, _args, _out: None  # noqa: E731
    seen.append(nn.modules.module.register_module_forward_hook(hook))


def wrapped(kind, model, seen):
    _, encoder, layer = parts(model)
    layers = getattr(encoder, "layer", None) or encoder.albert_layer_groups
    layers[0] = wrapping.checkpoint_wrapper(layer, getattr(wrapping.CheckpointImpl, kind))


def recomputed_by_hand(reentrant, model, seen):
    layer = parts(model)[2]
    own = layer.forward

    def forward(*args, **named):
        return recompute(lambda *given: own(*given, **named), *args, use_reentrant=reentrant)

    layer.forward = forward


def switch_of_the_backbone(model, seen):
    backbone = parts(model)[0]
    if "Albert" in type(backbone).__name__:
        pytest.skip("transformers has none")
    backbone._set_gradient_checkpointing(True, functools.partial(recompute, use_reentrant=False))


class Mixes(nn.Linear):
    """Head that mixes the tokens of a row."""

    def forward(self, x):
        return super().forward(x + x.roll(1, 1) + x.roll(-1, 1))


def head_that_mixes(model, seen):
    if (old := getattr(model, "classifier", None)) is None:
        pytest.skip("the head is tied")
    model.classifier = Mixes(old.in_features, old.out_features)
    model.classifier.load_state_dict(old.state_dict())


def replaced_head(model, seen):
    """Replace the head by one that reads each token alone."""
    if (old := getattr(model, "classifier", None)) is None:
        pytest.skip("the head is tied")
    model.classifier = nn.Linear(old.in_features, old.out_features)
    model.classifier.load_state_dict(old.state_dict())


def class_patched(model, seen):
    cls = type(parts(model)[2])
    seen.append(functools.partial(setattr, cls, "forward", cls.forward))
    own = cls.forward

    def forward(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        x = out if torch.is_tensor(out) else out[0]
        x = x - x.mean(1, keepdim=True)  # the mean over all tokens
        return x if torch.is_tensor(out) else (x, *out[1:])

    cls.forward = forward


CHANGES = [
    another_attention, hook_on_a_layer, hook_on_the_backbone, hook_on_all_modules,
    *(functools.partial(wrapped, kind) for kind in ("REENTRANT", "NO_REENTRANT")),
    *(functools.partial(recomputed_by_hand, flag) for flag in (True, False)),
    switch_of_the_backbone, head_that_mixes, class_patched,
]  # fmt: skip


def name_of(change):
    return change.func.__name__ + str(*change.args) if hasattr(change, "func") else change.__name__


def trained(model, change, run, batch):
    """Return the result of a run, what the change has seen, and every gradient by its plain name."""
    seen = []
    change(model, seen)
    try:
        found = run(model, batch)
    finally:
        for undo in seen:
            undo() if callable(undo) else getattr(undo, "remove", int)()
    seen = [x for x in seen if torch.is_tensor(x)]
    if hasattr(model, "consolidated_state_dict"):
        return found, seen, model.consolidated_state_dict(grads=True)
    return found, seen, {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}  # fmt: skip


def scheduled(folder, case, layout, change, run, kernels):
    (tp, pp, dp), options = LAYOUTS[layout]
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, auto_class=case.cls, kernels=kernels, **options
    ).train()
    r = model.mesh.coord("dp")
    mine = {k: v.tensor_split(dp)[r] for k, v in batch_of(case).items()}
    return trained(model, change, run, mine)


def by_step(model, batch):
    return model.train_step(batch)


def of_plain(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def compare(case, layout, change, root, run=by_step, plain_run=of_plain, kernels=KERNELS):
    folder = checkpoint(case, root)
    plain = getattr(transformers, case.cls).from_pretrained(folder).train()
    want, wanted, grads = trained(plain, change, plain_run, batch_of(case))
    each = emulate(scheduled, folder, case, layout, change, run, kernels, mesh=LAYOUTS[layout][0])
    for r, (found, seen, found_grads) in enumerate(each):
        dp, rows = LAYOUTS[layout][0][2], found.ndim > 0
        mine = want.tensor_split(dp)[r % dp] if rows else want
        if rows or run is not by_hand:
            torch.testing.assert_close(found, mine, rtol=1e-4, atol=1e-5)
        assert len(seen) == len(wanted)
        for x, y in zip(seen, wanted, strict=True):
            torch.testing.assert_close(x, y.tensor_split(dp)[r % dp], rtol=1e-3, atol=1e-4)
        largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
        for name, grad in (found_grads or {}).items() if r == 0 else ():
            if grads.get(name) is not None:
                torch.testing.assert_close(grad, grads[name], rtol=1e-3, atol=1e-5 * largest, msg=name)  # fmt: skip


OF_ONE_PROCESS = ("class_patched", "hook_on_all_modules")  # ranks are threads
OF_WHOLE_WEIGHTS = ("switch_of_the_backbone", "head_that_mixes", "replaced_head", "recomputed_by_handTrue", "recomputed_by_handFalse")  # fmt: skip


def cells(*columns):
    return [pytest.param(case, layout, column, id=f"{name}-{layout}-{name_of(column)}")
            for name, case in CASES.items() for layout in LAYOUTS for column in columns
            if name_of(column) not in {"1": (), "rows": (*OF_ONE_PROCESS, *OF_WHOLE_WEIGHTS)}.get(layout, OF_ONE_PROCESS)]  # fmt: skip


@pytest.mark.one_in(9, 2)
@pytest.mark.parametrize(("case", "layout", "change"), cells(*CHANGES))
def test_user_modified_encoder_runs_with_padding_and_equals_plain_transformers(
    case, layout, change, root, packed
):
    compare(case, layout, change, root)
    assert not packed


def nothing(model, seen):
    pass


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("case", "layout", "change"), cells(nothing, replaced_head))
def test_train_step_runs_the_encoder_on_unpadded_tokens_and_equals_plain_transformers(
    case, layout, change, root, packed
):
    compare(case, layout, change, root)
    assert packed


def over_all(output, batch):
    """Return a loss over all tokens, padding included."""
    return output.logits.float().log_softmax(-1).square().mean()


def by_hand(model, batch):
    loss = over_all(model(**batch), batch)
    loss.backward()
    return loss.detach()


def by_loss_fn(model, batch):
    return model.train_step(batch, loss_fn=over_all)


def logits_of_a_step(model, batch):
    return model.train_step(batch, return_logits=True).logits


def logits_of_plain(model, batch):
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach()


@pytest.mark.one_in(5, 2)
@pytest.mark.parametrize(("case", "layout", "run"), cells(by_hand, by_loss_fn, logits_of_a_step))
def test_logits_at_padding_positions_equal_plain_transformers(case, layout, run, root):
    """Regression: logits at padding, and a loss over them, were computed from hidden states of 0."""
    plain = logits_of_plain if run is logits_of_a_step else by_hand
    compare(case, layout, nothing, root, run, plain, kernels="auto")
