"""Costs of context parallelism: bytes that a rank sends for each layer, and its peak memory in a step."""

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.live_bytes import LiveBytes
from slapo_zoo.parallel.token_cut import WAYS

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, TOKENS, ROWS = 4, 8, 2, 8, 512, 2
WIDTH = HEADS * HEAD_SIZE
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
KINDS = {"all_gather", "reduce_scatter", "all_to_all", "shift"}
USUAL = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": 64,
    "max_position_embeddings": TOKENS, **ENDS,
}  # fmt: skip
# class --> tokens of a row, config; GPT-2, BERT and T5 with their dropout
MODELS = {
    "LlamaForCausalLM": (TOKENS, {**USUAL, "intermediate_size": 224, "num_key_value_heads": KV_HEADS}),
    "GPT2LMHeadModel": (128, {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 128,
                              "vocab_size": 64, "loss_type": "ForCausalLMLoss", **ENDS}),
    "BertForMaskedLM": (128, {**USUAL, "intermediate_size": 256}),
    "T5ForConditionalGeneration": (128, {
        "d_model": WIDTH, "num_heads": HEADS, "d_kv": HEAD_SIZE, "num_layers": LAYERS // 2, "d_ff": 256,
        "vocab_size": 64, "decoder_start_token_id": 0}),
}  # fmt: skip


def model_of(cls, cp, **options):
    config = getattr(transformers, cls).config_class(**MODELS[cls][1])
    options = {"dp": 1, "seed": 0, "kernels": "reference", **options}
    return AutoScheduledModel.from_config(config, auto_class=cls, cp=cp, **options).train()


def batch_of(cls, padded):
    tokens = MODELS[cls][0]
    ids = torch.arange(tokens).remainder(60).add(3).expand(ROWS, -1).contiguous()
    mask = {
        "attention_mask": (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 9]])).long()
    }
    return {"input_ids": ids, "labels": ids, **(mask if padded else {})}


def sent(cp, way):
    """Bytes of the tensors that this rank gathered, scattered or exchanged over cp in a step, by kind."""
    model, found = model_of("LlamaForCausalLM", cp, cp_attention=way), dict.fromkeys(KINDS, 0)
    group = model.mesh.group("cp")

    def note(kind, whole, over):
        if over is group and kind in KINDS and whole.is_floating_point():
            found[kind] += whole.nbytes

    collectives.OBSERVERS.append(note)
    try:
        model.train_step(batch_of("LlamaForCausalLM", padded=False))
    finally:
        collectives.OBSERVERS.remove(note)
    return found


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gathered_bytes_are_those_of_keys_and_values(cp):
    """Keys and values of a layer are gathered in the forward and once more in the backward, for which a rank saves
    its own alone; their gradients are reduced and scattered."""
    layer = 2 * ROWS * KV_HEADS * TOKENS * HEAD_SIZE * 4  # fp32
    expected = {
        "all_gather": 2 * LAYERS * layer,
        "reduce_scatter": LAYERS * layer,
        "all_to_all": 0,
        "shift": 0,
    }
    for found in emulate(sent, cp, "gather", mesh=(1, 1, cp)):
        assert found == pytest.approx(
            expected, rel=0.02, abs=64
        )  # counts of targets are gathered too


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanged_bytes_are_those_of_queries_keys_values_and_outputs(cp):
    """By heads: each is exchanged in the forward, and its gradient in the backward; KV heads are at least cp."""
    heads = 2 * HEADS + 2 * max(KV_HEADS, cp)
    layer = heads * ROWS * TOKENS // cp * HEAD_SIZE * 4
    expected = {"all_gather": 0, "reduce_scatter": 0, "all_to_all": 2 * LAYERS * layer, "shift": 0}
    for found in emulate(sent, cp, "ulysses", mesh=(1, 1, cp)):
        assert found == pytest.approx(
            expected, rel=0.02, abs=64
        )  # counts of targets are gathered too


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_on_the_ring_are_those_of_keys_values_and_their_gradients(cp):
    """Keys and values pass cp - 1 ranks in the forward and again in the backward, their gradients all cp."""
    layer = (3 * cp - 2) * 2 * ROWS * KV_HEADS * TOKENS // cp * HEAD_SIZE * 4
    expected = {"all_gather": 0, "reduce_scatter": 0, "all_to_all": 0, "shift": LAYERS * layer}
    for found in emulate(sent, cp, "ring", mesh=(1, 1, cp)):
        assert found == pytest.approx(expected, rel=0.02, abs=64)


def peak(cls, padded, cp, **options):
    """Bytes that live at most in a step, of all tensors that the step makes: activations, gradients, temporary ones."""
    model = model_of(cls, cp, **options)
    with LiveBytes() as live:
        model.train_step(batch_of(cls, padded))
    return live.peak


QUICK = ("LlamaForCausalLM", True, "gather")


@pytest.mark.parametrize(
    ("cls", "padded", "way"),
    [
        pytest.param(*cell, marks=() if cell == QUICK else pytest.mark.slow)
        for cls in MODELS for padded in (False, True) for cell in ((cls, padded, way) for way in WAYS)
    ],
)  # fmt: skip
def test_peak_of_a_step_shrinks_with_cp(cls, padded, way):
    """At most 1.1 / cp of one rank's peak."""
    one = peak(cls, padded, 1)
    for cp in (2, 4):
        for found in emulate(peak, cls, padded, cp, cp_attention=way, mesh=(1, 1, cp)):
            assert found <= 1.1 * one / cp


def masked_elements(way, padded, cp):
    """Elements of the masks that the model's mask functions make in a step whose batch has a mask [rows, tokens]."""
    model = model_of("GPT2LMHeadModel", cp, cp_attention=way)
    batch = batch_of("GPT2LMHeadModel", padded=True)
    batch["attention_mask"] = batch["attention_mask"] if padded else torch.ones_like(batch["input_ids"])  # fmt: skip
    seen = []
    for _, module in model.named_modules():
        if isinstance(module, CoreAttention):
            module.register_forward_pre_hook(lambda _m, given: seen.append(0 if given[3] is None else given[3].numel()))  # fmt: skip
    model.train_step(batch)
    return seen


@pytest.mark.parametrize("way", WAYS[1:])
def test_mask_without_padding_costs_nothing(way):
    """All cp ranks know before the step whether a row has padding; only then a mask is made."""
    for found in emulate(masked_elements, way, False, 2, mesh=(1, 1, 2)):
        assert found == [0] * LAYERS
    for found in emulate(masked_elements, way, True, 2, mesh=(1, 1, 2)):
        assert min(found) > 0
