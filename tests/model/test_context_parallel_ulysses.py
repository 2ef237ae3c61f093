"""Context parallelism with attention by heads (cp_attention="ulysses"): ranks train as one process."""

import pytest

from cut_rows import FAMILIES, case_of, closeness, require_equal, rows_of, trained
from parity import tiny_config
from slapo_zoo import AutoScheduledModel, MeshError, emulate

WAY = {"cp_attention": "ulysses"}
FOUR = {"hidden_size": 32, "num_attention_heads": 4}
# class --> changes of the config, for heads that four ranks of cp divide; Llama's 8 heads share 2 KV heads
HEADS = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4},
    "GPTNeoForCausalLM": {"hidden_size": 32, "num_heads": 4},
    "OPTForCausalLM": {**FOUR, "word_embed_proj_dim": 32},
    "ModernBertForMaskedLM": {"num_attention_heads": 4},
    "T5ForConditionalGeneration": {"num_heads": 4},
    "BartForConditionalGeneration": {
        "d_model": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen3ForCausalLM": {},
}
QUICK = {("LlamaForCausalLM", "bare", 4), ("T5ForConditionalGeneration", "padded", 2), ("GPTNeoForCausalLM", "packed", 2)}  # fmt: skip


def cells():
    for cls, (_, masks, _) in FAMILIES.items():
        for mask in masks:
            for cp in (2, 4):
                marks = () if (cls, mask, cp) in QUICK else pytest.mark.slow
                yield pytest.param(cls, mask, cp, marks=marks)


def case(cls):
    return case_of(cls, **HEADS.get(cls, FOUR))


@pytest.mark.parametrize(("cls", "mask", "cp"), list(cells()))
def test_attention_by_heads_trains_as_one_process(cls, mask, cp):
    """Losses, every gradient, the norm, and weights after three steps, with dropout."""
    one = case(cls)
    found = emulate(trained, one, mask, mesh=(1, 1, cp), cp=cp, **WAY)
    require_equal(found[0], trained(one, mask), **closeness(one))
    assert all(each[0] == found[0][0] for each in found)


# class, kind of rows, sizes of the mesh, options of the loader
TOGETHER = [
    ("GPT2LMHeadModel", "padded", {"tp": 2}, {"sequence_parallel": True, "checkpoint_ratio": 0.5}),
    ("BertForMaskedLM", "left", {"dp": 2}, {"micro_batches": 2, "attention": "eager", "dp_shard": 2}),
    ("T5ForConditionalGeneration", "bare", {"pp": 2}, {"micro_batches": 2}),
    ("LlamaForCausalLM", "packed", {"tp": 2, "pp": 2}, {"micro_batches": 2}),
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("cls", "mask", "sizes", "options"), TOGETHER)
def test_attention_by_heads_on_a_mesh_trains_as_one_process(cls, mask, sizes, options):
    one, ranks = case(cls), sizes.get("dp", 1) * 2
    mesh = sizes.get("tp", 1), sizes.get("pp", 1), ranks
    alone = trained(one, mask, attention=options.get("attention"))
    found = emulate(trained, one, mask, mesh=mesh, cp=2, **sizes, **options, **WAY)
    require_equal(found[0], alone, atol=1e-6)


def loss_of(one, tokens, **layout):
    """Loss of rows of some tokens."""
    layout = {"dp": 1, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(one)[0], auto_class=one.cls, **layout)
    batch = {name: x[:, :tokens].contiguous() for name, x in rows_of(one, "padded").items()}
    return float(model.train().train_step(batch))


def test_rows_that_cp_does_not_divide_are_padded_for_attention_by_heads():
    one = case_of("GPT2LMHeadModel", 0.0, n_head=6)
    expected = loss_of(one, 11)
    assert emulate(loss_of, one, 11, cp=3, mesh=(1, 1, 3), **WAY) == pytest.approx([expected] * 3)


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "GPTNeoForCausalLM", "T5ForConditionalGeneration"])  # fmt: skip
def test_heads_that_cp_does_not_divide_are_refused_at_the_load(cls):
    with pytest.raises(MeshError, match=r"cp=2 does not divide the 5 heads") as caught:
        emulate(loss_of, case_of(cls), 12, cp=2, mesh=(1, 1, 2), **WAY)
    assert caught.value.hint == 'use cp_attention="gather", or cp among 1, 5'
