"""Dropout of calls: two calls differ, a recomputed one draws the same, and all layouts draw alike."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint as recomputed

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.parallel.ranks.emulation import emulate

BERT = Case("BertForMaskedLM", ("tokens",), dropout=0.2)
GPT2 = Case("GPT2LMHeadModel", ("tokens",), dropout=0.2)
TEXT = ("input_ids", "attention_mask")
LAYOUTS = {
    "1": {},
    "tp2": {"tp": 2},
    "dp2": {"dp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("calls")


def on(layout, work, *args):
    options = LAYOUTS[layout]
    sizes = tuple(options.get(name, 1) for name in ("tp", "pp", "dp"))
    return (
        [work(options, *args)] if sizes == (1, 1, 1) else emulate(work, options, *args, mesh=sizes)
    )


def trained(folder, options, case=BERT, **more):
    options = {"seed": 0, "kernels": "reference", **options, **more}
    return AutoScheduledModel.from_pretrained(folder, auto_class=case.cls, **options).train()


def tokens(model, step=0):
    """This dp rank's rows of a batch."""
    n, r = model.mesh.dp, model.mesh.coord("dp")
    return {k: v.tensor_split(n)[r] for k, v in batch_of(BERT, step).items()}


def text(model):
    return {k: v for k, v in tokens(model).items() if k in TEXT}


CALLS = {
    "whole": lambda m, b: m(**b).loss,
    "part": lambda m, b: m.bert(**{k: b[k] for k in TEXT})[0].square().mean(),
    "layer": lambda m, b: m.bert.encoder.layer[0](m.bert.embeddings(b["input_ids"])).square().mean(),
}  # fmt: skip


def as_it_is(model, call):
    return call()


def reentrant(model, call):
    return recomputed(
        lambda x: call() + 0 * x, torch.zeros((), requires_grad=True), use_reentrant=True
    )


def not_reentrant(model, call):
    return recomputed(call, use_reentrant=False)


def cached(model, call):
    """Call the model as GradCache does: without a graph first, then other calls, then again from the saved RNG state."""
    state = torch.get_rng_state()
    with torch.no_grad():
        before = call()
        call()
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        again = call()
    assert torch.equal(before, again)
    return again


WAYS = (as_it_is, reentrant, not_reentrant, cached)


def repeated(options, folder, what):
    """Return loss and gradients of one call, in each way of calling, from the same seed."""
    model, found = trained(folder, options), []
    batch = tokens(model)
    for way in WAYS:
        model.zero_grad()
        torch.manual_seed(5)
        loss = way(model, lambda: CALLS[what](model, batch))
        CALLS[what](model, batch)  # another forward has come in between
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
    return found


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2", marks=pytest.mark.slow), "tp2-sp"])
def test_recomputed_forward_draws_the_dropout_masks_of_the_first_forward(layout, what, root):
    for (loss, grads), *others in on(layout, repeated, checkpoint(BERT, root), what):
        for again, found in others:
            torch.testing.assert_close(again, loss)
            for name, grad in grads.items():
                torch.testing.assert_close(found[name], grad, atol=1e-7, rtol=1e-4, msg=name)


def views(options, folder, case=BERT):
    """Return hidden states of successive backbone calls and of samples in evaluation, and losses of full calls."""
    model = trained(folder, options, case)
    batch, inputs = tokens(model), text(model)
    part = model.bert if case is BERT else model.transformer
    found = [part(**inputs)[0].detach() for _ in range(2)]
    losses = [float(model(**batch).loss.detach()) for _ in range(2)]
    model.eval()
    for module in model.modules():
        module.training = isinstance(module, torch.nn.Dropout)
    found += [model(**inputs).logits.detach() for _ in range(2)]
    model.eval()
    found += [part(**inputs)[0].detach()]
    return found, losses


@pytest.mark.parametrize(
    "case", [BERT, pytest.param(GPT2, marks=pytest.mark.slow)], ids=["bert", "gpt2"]
)
def test_each_forward_draws_new_dropout_masks_that_are_equal_on_all_layouts(case, root):
    folder = checkpoint(case, root)
    ((found, losses),) = on("1", views, folder, case)
    for one, other in (found[:2], found[2:4]):
        assert float((one - other).abs().max()) > 0.1
    assert abs(losses[0] - losses[1]) > 1e-3
    for layout in ("tp2", "dp2", "tp2-sp"):
        for rank, (mine, own) in enumerate(on(layout, views, folder, case)):
            for x, whole in zip(mine, found, strict=True):
                want = whole.tensor_split(2)[rank] if layout == "dp2" else whole
                torch.testing.assert_close(x, want, atol=1e-4, rtol=1e-4)
            assert layout == "dp2" or own == pytest.approx(losses, rel=1e-4)


def wrapped(options, folder, impl, loop):
    """Return gradients of a model, and of one whose layers torch's checkpoint wrapper recomputes."""
    found = []
    for wraps in (False, True):
        model = trained(folder, options)
        layers = model.bert.encoder.layer
        for i in range(len(layers) if wraps else 0):
            layers[i] = checkpoint_wrapper(layers[i], impl)
        batches = [tokens(model, step) for step in range(2)]
        if loop == "step":
            model.train_step(batches[0], micro_batches=2)
        else:
            sum(CALLS[loop](model, batch) for batch in batches).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("impl", CheckpointImpl)
@pytest.mark.parametrize("loop", ["whole", "part", "step"])
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2-sp", marks=pytest.mark.slow)])
def test_layers_recomputed_by_torch_checkpoint_wrapper_have_unchanged_dropout_and_gradients(
    layout, loop, impl, root
):
    for mine, again in on(layout, wrapped, checkpoint(BERT, root), impl, loop):
        for name, grad in mine.items():
            torch.testing.assert_close(again[name], grad, atol=1e-7, rtol=1e-4, msg=name)


def test_torch_manual_seed_with_the_same_seed_repeats_the_dropout_masks(root):
    model = trained(checkpoint(BERT, root), {})
    batch = tokens(model)

    def losses():
        return [float(model(**batch).loss.detach()) for _ in range(2)]

    torch.manual_seed(3)
    first = losses()
    with torch.random.fork_rng():
        torch.manual_seed(4)
        assert losses() != first
    after = losses()
    torch.manual_seed(3)
    assert losses() == first
    assert losses() == after
    state = torch.get_rng_state()
    model.eval()(**batch)
    assert torch.equal(torch.get_rng_state(), state)
    still = trained(checkpoint(replace(BERT, dropout=0.0), root), {})
    state = torch.get_rng_state()
    still(**batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_forward_in_a_hand_written_loop_draws_the_dropout_masks_of_train_step(root):
    one, other = (trained(checkpoint(BERT, root), {}) for _ in range(2))
    batch = tokens(one)
    one.bert(**text(one))  # a part does not move the step
    assert float(one(**batch).loss.detach()) == pytest.approx(float(other.train_step(batch)))
    assert one.schedule.state.random.step == other.schedule.state.random.step == 1


@pytest.mark.parametrize("call", CALLS)
def test_dropout_masks_after_a_resume_equal_those_of_an_uninterrupted_run(root, tmp_path, call):
    folder = checkpoint(BERT, root)
    first, second = trained(folder, {}), trained(folder, {})
    for _ in range(2):
        CALLS[call](first, tokens(first))
    save_checkpoint(first, tmp_path / "out")
    expected = [CALLS[call](first, tokens(first)).item() for _ in range(2)]
    torch.manual_seed(99)
    load_checkpoint(second, tmp_path / "out")
    assert [CALLS[call](second, tokens(second)).item() for _ in range(2)] == expected
