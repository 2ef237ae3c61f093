"""Generation and evaluation on every rank, against plain transformers."""

import pytest
import torch
import transformers

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
BERT = Case("BertForMaskedLM", ("tokens",))
LAYOUTS = {"one": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}
GREEDY = {"max_new_tokens": 8, "do_sample": False}
SAMPLED = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
BEAMS = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "num_return_sequences": 2}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("generate")


def prompts():
    """Three rows of 2, 5 and 4 tokens, padded on the left."""
    rows = [[7, 31], [5, 88, 41, 6, 19], [90, 12, 3, 54]]
    ids = torch.tensor([[0] * (5 - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generate(folder, tp, pp, how, seed=None):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp)
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(**prompts(), **how)


def plain(folder, how, seed=None):
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(**prompts(), **how)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_plain_transformers(layout, root, ranks):
    tp, pp = LAYOUTS[layout]
    folder = checkpoint(GPT2, root)
    want = plain(folder, GREEDY)
    assert want.shape == (3, 13)
    assert len({tuple(row) for row in want[:, 5:].tolist()}) == 3  # the rows differ
    for found in ranks.run(generate, tp * pp, folder, tp, pp, GREEDY):
        assert torch.equal(found, want)


@pytest.mark.parametrize(("how", "layout"), [("sampled", "tp2"), ("sampled", "tp2-pp2"), ("beams", "tp2"), ("beams", "pp2")])  # fmt: skip
def test_sampling_and_beams_equal_plain_transformers(how, layout, root, ranks):
    """With the same torch seed on all ranks they draw the same tokens, as one process does."""
    tp, pp = LAYOUTS[layout]
    options, folder = {"sampled": SAMPLED, "beams": BEAMS}[how], checkpoint(GPT2, root)
    want = plain(folder, options, seed=11)
    for found in ranks.run(generate, tp * pp, folder, tp, pp, options, 11):
        assert torch.equal(found, want)
    if how == "sampled":
        assert not torch.equal(plain(folder, options, seed=12), want)


def after_training(folder, tp, pp):
    """generate() between training steps: the model's mode and its next step stay as they are."""
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, seed=2).train()
    model.train_step(batch_of(GPT2))
    model.eval()
    first = model.generate(**prompts(), **GREEDY)
    model.train()
    loss = model.train_step(batch_of(GPT2, 1))
    return first, float(loss)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_generation_between_steps(layout, root, ranks):
    tp, pp = LAYOUTS[layout]
    folder = checkpoint(Case("GPT2LMHeadModel", ("tokens",), dropout=0.1), root)
    ((want, loss),) = ranks.run(after_training, 1, folder, 1, 1)
    for found, ours in ranks.run(after_training, tp * pp, folder, tp, pp):
        assert torch.equal(found, want)
        assert ours == pytest.approx(loss, rel=1e-5)


def evaluate(case, folder, tp, pp, positional):
    """All fields of the output on this rank, for keyword and positional arguments."""
    model, batch = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp), batch_of(case)
    with torch.no_grad():
        output = model(batch.pop("input_ids"), **batch) if positional else model(**batch)
    tensors = {k: v for k, v in output.items() if isinstance(v, torch.Tensor)}
    return type(output).__name__, tensors, output.logits is output["logits"], output.to_tuple()[:2]


@pytest.mark.parametrize(("layout", "positional"), [*((name, False) for name in LAYOUTS), ("tp2", True), ("pp2", True)])  # fmt: skip
@pytest.mark.parametrize("case", [GPT2, BERT], ids=lambda c: c.cls)
def test_forward_on_every_rank(case, layout, positional, root, ranks):
    """A HuggingFace output object with full logits and the loss, as plain tensors."""
    tp, pp = LAYOUTS[layout]
    folder = checkpoint(case, root)
    model = getattr(transformers, case.cls).from_pretrained(folder).eval()
    with torch.no_grad():
        want = model(**batch_of(case))
    for name, tensors, by_name, pair in ranks.run(evaluate, tp * pp, case, folder, tp, pp, positional):  # fmt: skip
        assert name == type(want).__name__
        assert {"loss", "logits"} <= tensors.keys()
        assert by_name
        torch.testing.assert_close(tensors["logits"], want.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tensors["loss"], want.loss, rtol=1e-5, atol=1e-5)
        assert torch.equal(pair[1], tensors["logits"])
        assert type(tensors["logits"]) is torch.Tensor


def shapes_change(folder, pp):
    """Batches of other sizes one after the other, with and without labels, mask and rows."""
    model, found = AutoScheduledModel.from_pretrained(folder, pp=pp), []
    for rows, tokens in ((4, 12), (1, 5), (3, 12), (4, 1), (4, 12)):
        batch = {k: v[:rows, :tokens] for k, v in batch_of(GPT2).items()}
        found.append(model(**batch).logits.detach())
        found.append(model(input_ids=batch["input_ids"]).logits.detach())
    return found


def test_shapes_may_change(root, ranks):
    folder = checkpoint(GPT2, root)
    (want,) = ranks.run(shapes_change, 1, folder, 1)
    for found in ranks.run(shapes_change, 2, folder, 2):
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
