"""Context parallelism with other ways of attention (cp_attention=): ranks train as one process."""

import pytest
import torch

from cut_rows import FAMILIES, case_of, closeness, require_equal, rows_of, trained
from parity import tiny_config
from slapo_zoo import AutoScheduledModel, MeshError, emulate
from slapo_zoo.hf import cut_gather

WAYS = ("ulysses", "ring")
FOUR = {"hidden_size": 32, "num_attention_heads": 4}
BART = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
# class --> changes of the config, for heads that four ranks of cp divide; Llama's 8 heads share 2 KV heads
HEADS = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4},
    "GPTNeoForCausalLM": {"hidden_size": 32, "num_heads": 4},
    "OPTForCausalLM": {**FOUR, "word_embed_proj_dim": 32},
    "ModernBertForMaskedLM": {"num_attention_heads": 4},
    "T5ForConditionalGeneration": {"num_heads": 4},
    "BartForConditionalGeneration": BART,
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen3ForCausalLM": {},
}
QUICK = {
    ("ulysses", "LlamaForCausalLM", "bare", 4), ("ulysses", "T5ForConditionalGeneration", "padded", 2),
    ("ulysses", "GPTNeoForCausalLM", "packed", 2), ("ring", "LlamaForCausalLM", "left", 4),
    ("ring", "GPT2LMHeadModel", "bare", 2), ("ring", "T5ForConditionalGeneration", "padded", 2),
}  # fmt: skip


def cells():
    for way in WAYS:
        for cls, (_, masks, _) in FAMILIES.items():
            for mask in masks if (way, cls) != ("ring", "GPTNeoForCausalLM") else ():
                for cp in (2, 4):
                    marks = () if (way, cls, mask, cp) in QUICK else pytest.mark.slow
                    yield pytest.param(way, cls, mask, cp, marks=marks)


def case(cls, dropout=0.1):
    return case_of(cls, dropout, **HEADS.get(cls, FOUR))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("way", "cls", "mask", "cp"), list(cells()))
def test_every_cp_attention_option_has_the_losses_and_gradients_of_one_process(way, cls, mask, cp):
    """Losses, every gradient, the norm, and weights after two steps, with dropout."""
    one = case(cls)
    found = emulate(trained, one, mask, mesh=(1, 1, cp), cp=cp, cp_attention=way)
    require_equal(found[0], trained(one, mask), **closeness(one))
    assert all(each[0] == found[0][0] for each in found)


# class, kind of rows, sizes of the mesh, options of the loader
TOGETHER = [
    ("GPT2LMHeadModel", "padded", {"tp": 2}, {"sequence_parallel": True, "checkpoint_ratio": 0.5}),
    ("BertForMaskedLM", "left", {"dp": 2}, {"micro_batches": 2, "dp_shard": 2}),
    ("T5ForConditionalGeneration", "bare", {"pp": 2}, {"micro_batches": 2}),
    ("LlamaForCausalLM", "packed", {"tp": 2, "pp": 2}, {"micro_batches": 2}),
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("cls", "mask", "sizes", "options"), TOGETHER)
def test_every_cp_attention_option_with_tp_pp_or_dp_has_the_losses_of_one_process(
    way, cls, mask, sizes, options
):
    one, ranks = case(cls), sizes.get("dp", 1) * 2
    mesh = sizes.get("tp", 1), sizes.get("pp", 1), ranks
    found = emulate(trained, one, mask, mesh=mesh, cp=2, cp_attention=way, **sizes, **options)
    require_equal(found[0], trained(one, mask), atol=1e-6)


@pytest.mark.parametrize(
    ("way", "cls", "mask"),
    [
        ("ring", "LlamaForCausalLM", "bare"),
        *(
            pytest.param(way, cls, mask, marks=pytest.mark.slow)
            for way in WAYS
            for cls in ("LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration")
            for mask in FAMILIES[cls][1]
            if (way, cls, mask) != ("ring", "LlamaForCausalLM", "bare")
        ),
    ],
)
def test_every_cp_attention_option_without_dropout_has_the_losses_of_one_process(way, cls, mask):
    """Fused attention of one process; queries that see no key have no output there."""
    one = case(cls, dropout=0.0)
    found = emulate(trained, one, mask, mesh=(1, 1, 2), cp=2, cp_attention=way)
    require_equal(found[0], trained(one, mask))


def of_long_row(one, **layout):
    """Loss and gradients of one row of 128 tokens."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(one)[0], auto_class=one.cls, **layout)
    ids = torch.arange(128).mul(7).remainder(29).add(3)[None]
    loss = model.train().train_step({"input_ids": ids, "labels": ids})
    return [float(loss)], model.consolidated_state_dict(grads=True), 0.0, {}


@pytest.mark.parametrize("options", [{}, {"checkpoint_ratio": 1.0}], ids=["kept", "recomputed"])
def test_cp_on_causal_sequences_longer_than_the_hidden_size_has_the_losses_of_one_process(
    options, monkeypatch
):
    """With keys gathered, a mask is made for each run of queries, here three; keys are gathered again once a backward."""
    one, gathers, gathered = case("LlamaForCausalLM", dropout=0.0), [], cut_gather._gathered
    monkeypatch.setattr(cut_gather, "RUN", 1)
    monkeypatch.setattr(
        cut_gather, "_gathered", lambda *given: gathers.append(1) or gathered(*given)
    )
    found = emulate(of_long_row, one, mesh=(1, 1, 2), cp=2, **options)
    require_equal(found[0], of_long_row(one))
    blocks = tiny_config(one)[0].num_hidden_layers
    assert len(gathers) == (0 if options else 2 * 2 * blocks)  # keys and values, two ranks


def loss_of(one, tokens, **layout):
    """Loss of rows of some tokens."""
    layout = {"dp": 1, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(one)[0], auto_class=one.cls, **layout)
    batch = {name: x[:, :tokens].contiguous() for name, x in rows_of(one, "padded").items()}
    return float(model.train().train_step(batch))


@pytest.mark.parametrize("way", WAYS)
def test_every_cp_attention_option_pads_sequences_that_cp_does_not_divide_and_keeps_the_loss(way):
    one = case_of("GPT2LMHeadModel", 0.0, n_head=6)
    expected = loss_of(one, 11)
    found = emulate(loss_of, one, 11, cp=3, mesh=(1, 1, 3), cp_attention=way)
    assert found == pytest.approx([expected] * 3)


REFUSED = [
    ("GPT2LMHeadModel", {"cp_attention": "ulysses"}, "cp=2 does not divide the 5 heads", 'use cp_attention="gather", or cp among 1, 5'),
    ("GPTNeoForCausalLM", {"cp_attention": "ulysses"}, "cp=2 does not divide the 5 heads", 'use cp_attention="gather", or cp among 1, 5'),
    ("T5ForConditionalGeneration", {"cp_attention": "ulysses"}, "cp=2 does not divide the 5 heads", 'use cp_attention="gather", or cp among 1, 5'),
    ("GPTNeoForCausalLM", {"cp_attention": "ring"}, "computes its own scores", 'use cp_attention="gather" or "ulysses"'),
    ("BertForMaskedLM", {"cp_attention": "ring", "attention": "eager"}, "which computes the scores itself", 'leave attention= out, or use cp_attention="gather"'),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options", "problem", "hint"), REFUSED)
def test_model_that_the_cp_attention_option_does_not_support_is_refused_at_load(
    cls, options, problem, hint
):
    with pytest.raises(MeshError, match=problem) as caught:
        emulate(loss_of, case_of(cls), 12, cp=2, mesh=(1, 1, 2), **options)
    assert caught.value.hint == hint


@pytest.mark.slow  # the schedule is derived for 12 CPU seconds; the refusal at the load runs always
def test_ulysses_attention_refuses_heads_that_cp_does_not_divide_in_the_forward():
    """The load probes a shrunken model of 4 heads; the 5 heads of the model are seen first in the forward."""
    case = case_of("BioGptForCausalLM", num_attention_heads=5, hidden_size=20)
    with pytest.raises(MeshError, match='cp_attention="ulysses": cp=2 does not divide the 5 heads'):
        emulate(trained, case, "bare", mesh=(1, 1, 2), cp=2, cp_attention="ulysses", schedule="auto")  # fmt: skip
