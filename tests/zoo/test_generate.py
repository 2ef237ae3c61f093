"""Generation and evaluation on every rank, against plain transformers."""

from dataclasses import replace

import pytest
import torch
import transformers

from heads import HEADS
from parity import Case, batch_of, changes_of, checkpoint
from slapo_zoo import AutoScheduledModel, SlapoError

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
BERT = Case("BertForMaskedLM", ("tokens",))
DECODER = (("is_decoder", True),)
WHISPER = "WhisperForConditionalGeneration"  # it listens, and returns no logits
FAMILIES = {
    "gpt2": GPT2,
    "bert": Case("BertLMHeadModel", (), DECODER),
    "roberta": Case("RobertaForCausalLM", (), DECODER),
    **{case.cls: replace(case, labels=()) for case in (cases[0] for cases in HEADS.values())
       if case.cls.endswith(("ForCausalLM", "ForConditionalGeneration")) and case.cls != WHISPER},
}  # fmt: skip
LAYOUTS = {"one": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}
BASE = {
    "max_new_tokens": 6,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
HOW = {
    "greedy": BASE,
    "static": {**BASE, "cache_implementation": "static"},
    "sampled": {**BASE, "do_sample": True, "temperature": 20.0, "top_k": 20, "top_p": 0.95},
    "beams": {**BASE, "num_beams": 3, "num_return_sequences": 2},
    "no-cache": {**BASE, "use_cache": False},
}  # fmt: skip
SEED = 11


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("generate")


def prompts(model):
    """Return three rows of 2, 5 and 4 tokens, padded on the left, for an encoder on the right, with labels, as
    Seq2SeqTrainer passes them.
    """
    rows = [[7, 31], [5, 88, 41, 6, 19], [90, 12, 3, 54]]
    pads = [[0] * (5 - len(row)) for row in rows]
    both = zip(rows, pads, strict=True)
    late = model.config.is_encoder_decoder
    ids = torch.tensor([row + pad if late else pad + row for row, pad in both])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()} | (
        {"labels": ids} if late else {}
    )


def every_way(model, ways):
    """Generate in every way; return way --> tokens and logits."""
    found = {}
    for how in ways:
        torch.manual_seed(SEED)
        output = model.generate(**prompts(model), **HOW[how])
        found[how] = output.sequences, torch.stack(output.logits)
    return found


def ways_of(case, pp):
    """Return the ways to generate: a pipeline has no cache, and Mamba no static one."""
    without = {"static"} if pp > 1 or "Mamba" in case.cls else set()
    return [how for how in HOW if how not in without]


def generate(case, folder, tp, pp):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, **changes_of(case)).eval()
    return every_way(model, ways_of(case, pp))


def plain(case, folder, pp):
    cls = getattr(transformers, case.cls)
    model = cls.from_pretrained(folder, **changes_of(case)).eval()
    return every_way(model, ways_of(case, pp))


def layouts_of(name):
    """Return the layouts of a family: GPT-2 and T5 on all, the others with tp and with pp."""
    return LAYOUTS if name in ("gpt2", "T5ForConditionalGeneration") else ("tp2", "pp2")


QUICK = ("gpt2-pp2", "gpt2-tp2-pp2", "gpt2-tp4", "T5ForConditionalGeneration-pp2")


def cells():
    for name in FAMILIES:
        for layout in layouts_of(name):
            label = f"{name}-{layout}"
            marks = () if layout == "tp2" or label in QUICK else pytest.mark.slow
            yield pytest.param(name, layout, marks=marks, id=label)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("name", "layout"), [*cells()])
def test_generate_returns_the_tokens_and_logits_of_plain_transformers(name, layout, root, ranks):
    """Compare tokens and logits of greedy search, sampling and beam search, with both caches and none, on every rank."""
    (tp, pp), case = LAYOUTS[layout], FAMILIES[name]
    folder = checkpoint(case, root)
    want = plain(case, folder, pp)
    for found in ranks.run(generate, tp * pp, case, folder, tp, pp):
        for how, (tokens, logits) in want.items():
            assert torch.equal(found[how][0], tokens), how
            torch.testing.assert_close(found[how][1], logits, rtol=1e-4, atol=1e-4)
    tokens, logits = want["sampled"]
    assert not torch.equal(tokens, want["greedy"][0])
    assert len({tuple(row) for row in tokens.tolist()}) == 3  # the rows differ
    assert (logits[0, 0] - logits[0, 1]).abs().max() > 1e-3


def heard(model):
    own = torch.Generator().manual_seed(SEED)  # ranks may be threads, which share torch's generator
    size = 3, model.config.num_mel_bins, 2 * model.config.max_source_positions
    sound = torch.randn(size, generator=own)
    return model.eval().generate(sound, max_new_tokens=6, do_sample=False)


def heard_on(folder, case, tp, pp):
    return heard(AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, **changes_of(case)))


def test_generate_from_audio_returns_the_tokens_of_plain_transformers(root, threads):
    case = HEADS["whisper"][0]
    folder = checkpoint(case, root)
    plain_model = getattr(transformers, WHISPER).from_pretrained(folder, **changes_of(case))
    want = heard(plain_model)
    for tp, pp in ((2, 1), (1, 2)):
        found = threads.run(heard_on, 2, folder, case, tp, pp)
        assert all(torch.equal(tokens, want) for tokens in found)


def with_cache(folder):
    model = AutoScheduledModel.from_pretrained(folder, pp=2)
    with pytest.raises(SlapoError, match=r"use_cache=True.*keeps no KV cache"):
        model.generate(**prompts(model), use_cache=True)
    with pytest.raises(SlapoError, match="stages keep no KV cache"):
        model(**prompts(model), past_key_values=transformers.DynamicCache())


def test_generate_with_a_kv_cache_on_several_pipeline_stages_is_refused(root, threads):
    threads.run(with_cache, 2, checkpoint(GPT2, root))


def after_training(folder, tp, pp):
    """Call generate() between training steps, which keeps the model's mode and its next step."""
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, seed=2).train()
    model.train_step(batch_of(GPT2))
    model.eval()
    first = model.generate(**prompts(model), max_new_tokens=8, do_sample=False)
    model.train()
    loss = model.train_step(batch_of(GPT2, 1))
    return first, float(loss)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_generate_between_training_steps_leaves_the_next_loss_unchanged(layout, root, threads):
    tp, pp = LAYOUTS[layout]
    folder = checkpoint(Case("GPT2LMHeadModel", ("tokens",), dropout=0.1), root)
    ((want, loss),) = threads.run(after_training, 1, folder, 1, 1)
    for found, ours in threads.run(after_training, tp * pp, folder, tp, pp):
        assert torch.equal(found, want)
        assert ours == pytest.approx(loss, rel=1e-5)


def evaluate(case, folder, tp, pp, positional):
    """Return all fields of the output on this rank, for keyword and positional arguments."""
    model, batch = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp), batch_of(case)
    with torch.no_grad():
        output = model(batch.pop("input_ids"), **batch) if positional else model(**batch)
    tensors = {k: v for k, v in output.items() if isinstance(v, torch.Tensor)}
    return type(output).__name__, tensors, output.logits is output["logits"], output.to_tuple()[:2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("layout", "positional"), [*((name, False) for name in LAYOUTS), ("tp2", True), ("pp2", True)])  # fmt: skip
@pytest.mark.parametrize("case", [GPT2, BERT], ids=lambda c: c.cls)
def test_forward_returns_the_transformers_output_with_full_logits_on_every_rank(
    case, layout, positional, root, threads
):
    """The output is a HuggingFace object with full logits and the loss, as plain tensors."""
    tp, pp = LAYOUTS[layout]
    folder = checkpoint(case, root)
    model = getattr(transformers, case.cls).from_pretrained(folder).eval()
    with torch.no_grad():
        want = model(**batch_of(case))
    for name, tensors, by_name, pair in threads.run(evaluate, tp * pp, case, folder, tp, pp, positional):  # fmt: skip
        assert name == type(want).__name__
        assert {"loss", "logits"} <= tensors.keys()
        assert by_name
        torch.testing.assert_close(tensors["logits"], want.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tensors["loss"], want.loss, rtol=1e-5, atol=1e-5)
        assert torch.equal(pair[1], tensors["logits"])
        assert type(tensors["logits"]) is torch.Tensor


def shapes_change(folder, pp):
    """Run batches of different sizes, with and without labels and mask."""
    model, found = AutoScheduledModel.from_pretrained(folder, pp=pp), []
    for rows, tokens in ((4, 12), (1, 5), (3, 12), (4, 1), (4, 12)):
        batch = {k: v[:rows, :tokens] for k, v in batch_of(GPT2).items()}
        found.append(model(**batch).logits.detach())
        found.append(model(input_ids=batch["input_ids"]).logits.detach())
    return found


def test_forward_with_changing_batch_shapes_has_the_outputs_of_one_rank(root, threads):
    folder = checkpoint(GPT2, root)
    (want,) = threads.run(shapes_change, 1, folder, 1)
    for found in threads.run(shapes_change, 2, folder, 2):
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


ROWS = torch.tensor([[[7, 31, 4]], [[5, 88, 41]]])  # of two dp ranks


def ended(model, rows, eos):
    options = {**BASE, "return_dict_in_generate": False, "output_logits": False, "pad_token_id": 0}
    return model.generate(rows, **options, eos_token_id=eos)


def ended_over_dp(folder, eos):
    model = AutoScheduledModel.from_pretrained(folder, dp=2, dp_shard=2).eval()
    return ended(model, ROWS[model.mesh.coord("dp")], eos)


def test_generate_with_dp_shard_stops_on_each_rank_at_the_end_of_its_own_rows(root, threads):
    folder = checkpoint(GPT2, root)
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    eos = int(ended(plain, ROWS[0], None)[0, 4])
    want = [ended(plain, rows, eos) for rows in ROWS]
    assert want[0].shape != want[1].shape
    found = threads.run(ended_over_dp, 2, folder, eos)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
