"""User's `loss_function`: exact over micro-batches, pp and dp, or an error."""

from functools import cache

import pytest
import torch
import transformers
from torch.nn import functional as fn

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.errors import MeshError

VOCAB, ROWS = 65, 4
CONFIG = transformers.LlamaConfig(
    hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, vocab_size=VOCAB,
    intermediate_size=24, max_position_embeddings=16, initializer_range=0.3, architectures=["LlamaForCausalLM"],
)  # fmt: skip
G = torch.Generator().manual_seed(0)
IDS = torch.randint(3, VOCAB, (ROWS, 8), generator=G)
LABELS = IDS.masked_fill(torch.arange(8) < torch.tensor([[0], [4], [2], [0]]), -100)
WEIGHT = 3 * torch.rand(VOCAB, generator=G)


def flat(logits, labels):
    return logits[:, :-1].reshape(-1, VOCAB).float(), labels[:, 1:].reshape(-1)


def own(function):
    """Make a `loss_function` from a function of logits [N, V] and labels [N]."""

    def loss_function(logits, labels, vocab_size, **kwargs):
        return function(*flat(logits, labels))

    return loss_function


def one_hot(y):
    return fn.one_hot(y.clamp(min=0), VOCAB).float()


def by_frequency(y):
    return 1.0 / (1 + torch.bincount(y[y >= 0], minlength=VOCAB))


def logged(x, y):
    loss, _ = fn.cross_entropy(x, y), (x.argmax(-1) == y).float().mean() + x.logsumexp(-1).mean()
    return 2 * (loss.float() / 3)


EXACT = {
    "plain": lambda x, y: fn.cross_entropy(x, y),
    "weights": lambda x, y: fn.cross_entropy(x, y, weight=WEIGHT),
    "weights-smoothed": lambda x, y: fn.cross_entropy(x, y, WEIGHT, label_smoothing=0.1),
    "weights-nll": lambda x, y: fn.nll_loss(x.log_softmax(-1), y, weight=WEIGHT),
    "weights-module": lambda x, y: torch.nn.CrossEntropyLoss(weight=WEIGHT)(x, y),
    "another-ignored": lambda x, y: fn.cross_entropy(x, y.masked_fill(y < 0, 9), ignore_index=9),
    "two-terms": lambda x, y: fn.cross_entropy(x, y) + fn.cross_entropy(x, y, weight=WEIGHT) * 0.5,
    "figures-beside": logged,
}
REFUSED = {
    "fewer-targets": (lambda x, y: fn.cross_entropy(x, y.masked_fill(y > 40, -100)), "class weights of its targets"),
    "weights-of-parts": (lambda x, y: fn.cross_entropy(x, y, weight=by_frequency(y)), "different class weights"),
    "mean-by-hand": (lambda x, y: fn.cross_entropy(x, y) + x.logsumexp(-1).mean(), "something else"),
    "share-by-hand": (lambda x, y: fn.cross_entropy(x, y) * (y > 9).float().mean(), "something else"),
    "curved": (lambda x, y: fn.cross_entropy(x, y).exp(), "something else"),
    "constant": (lambda x, y: fn.cross_entropy(x, y) + 0.1, "something else"),
    "sum": (lambda x, y: fn.cross_entropy(x, y, reduction="sum") / 7, "something else"),
    "elements": (lambda x, y: fn.mse_loss(x, one_hot(y)), "cannot ignore labels"),
}  # fmt: skip


def stepped(names, dp=1, pp=1, labels=LABELS, **options):
    """The loss and the norm of the gradients of each function."""
    model = AutoScheduledModel.from_config(CONFIG, dp=dp, pp=pp, seed=0).train()
    first = model.mesh.coord("dp") * (ROWS // dp)
    rows = slice(first, first + ROWS // dp)
    found = {}
    for name in names:
        model.loss_function = own(EXACT[name] if name in EXACT else ELEMENTS[name])
        model.zero_grad()
        loss = model.train_step({"input_ids": IDS[rows], "labels": labels[rows]}, **options)
        found[name] = float(loss), float(model.clip_grad_norm_(1e9))
    return found


@cache
def in_one_piece(function, labels=LABELS):
    model = AutoScheduledModel.from_config(CONFIG, seed=0).train()
    model.loss_function = own(function)
    loss = model(input_ids=IDS, labels=labels).loss
    loss.backward()
    return float(loss.detach()), float(model.clip_grad_norm_(1e9))


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_user_loss_function_over_micro_batches_has_the_gradients_of_the_full_batch(dp, pp):
    options = {} if dp * pp > 1 else {"micro_batches": 4}
    found = emulate(stepped, list(EXACT), dp, pp, **options, mesh=(1, pp, dp))[-1]
    for name, function in EXACT.items():
        assert found[name] == pytest.approx(in_one_piece(function), rel=1e-5), name


ELEMENTS = {
    "probabilities": lambda x, y: fn.cross_entropy(x, one_hot(y)),
    "squares": lambda x, y: fn.mse_loss(x, one_hot(y)) + fn.smooth_l1_loss(x, one_hot(y)),
    "bits": lambda x, y: fn.binary_cross_entropy_with_logits(x, one_hot(y), pos_weight=WEIGHT),
}


def test_user_loss_that_averages_over_elements_has_the_gradients_of_the_full_batch():
    found = stepped(list(ELEMENTS), labels=IDS, micro_batches=2)
    for name, function in ELEMENTS.items():
        assert found[name] == pytest.approx(in_one_piece(function, IDS), rel=1e-5), name


@pytest.mark.parametrize("name", REFUSED)
def test_user_loss_function_that_is_not_a_mean_over_targets_is_refused_with_micro_batches(name):
    function, words = REFUSED[name]
    model = AutoScheduledModel.from_config(CONFIG, seed=0).train()
    model.loss_function = kept = own(function)
    batch = {"input_ids": IDS, "labels": LABELS}
    with pytest.raises(MeshError, match=words):
        model.train_step(batch, micro_batches=2)
    assert model.loss_function is kept
    if name != "elements":  # the plain mean over elements counts ignored ones
        assert float(model.train_step(batch)) == pytest.approx(in_one_piece(function)[0], rel=1e-5)


def ignoring(_model, args, batch):
    return args, {**batch, "labels": batch["labels"].masked_fill(batch["labels"] > 40, -100)}


def penalised(_model, _args, output):
    output.loss = output.loss + output.logits.square().mean()


@pytest.mark.parametrize(
    ("hook", "words"),
    [(ignoring, "targets of a micro-batch"), (penalised, "a term that is no mean over targets")],
)
def test_hook_on_the_model_that_changes_labels_or_loss_is_refused_with_micro_batches(hook, words):
    """Regression: train_step ignored hooks on the model itself."""
    model = AutoScheduledModel.from_config(CONFIG, seed=0).train()
    if hook is ignoring:
        model.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        model.register_forward_hook(hook)
    batch = {"input_ids": IDS, "labels": LABELS}
    assert float(model.train_step(batch)) == pytest.approx(float(model(**batch).loss.detach()))
    with pytest.raises(MeshError, match=words):
        model.train_step(batch, micro_batches=2)


def test_class_weighted_loss_is_refused_when_train_step_gets_the_number_of_targets():
    model = AutoScheduledModel.from_config(CONFIG, seed=0).train()
    model.loss_function = own(EXACT["weights"])
    with pytest.raises(MeshError, match="divides by weights"):
        model.train_step({"input_ids": IDS, "labels": LABELS}, targets=[50])


def test_loss_fn_of_a_float64_model_over_three_micro_batches_has_gradients_of_float64():
    model = AutoScheduledModel.from_config(CONFIG, seed=0, dtype=torch.float64)

    def loss_fn(output, batch):
        return output.logits.sin().mean()

    ids = IDS[:3]
    loss_fn(model(input_ids=ids), None).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.train_step({"input_ids": ids}, micro_batches=3, loss_fn=loss_fn)
    for p, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-11, atol=1e-15)
