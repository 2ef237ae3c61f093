"""The planner places cp: what a rank gets, keeps, sends and computes is read from a dry run of the cut program."""

import functools
from dataclasses import replace

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.errors import MeshError
from slapo_zoo.hf import cut_gather
from slapo_zoo.hf.example_inputs import cut_example, training_batch
from slapo_zoo.model.step.cut_batch import cut_batch
from slapo_zoo.parallel.token_cut import TokenCut
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.timing import exchange_seconds

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 64}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, **ENDS}  # fmt: skip
CONFIGS = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, **ENDS},
    "LlamaForCausalLM": TINY,
    "OPTForCausalLM": {**TINY, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "BertForMaskedLM": TINY,
    "RobertaForMaskedLM": {**TINY, "max_position_embeddings": 64},
    "BartForConditionalGeneration": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2,
                                     "encoder_attention_heads": 2, "decoder_attention_heads": 2, **ENDS},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
                                   "decoder_start_token_id": 0, "vocab_size": 64},
}  # fmt: skip
HEADS, KV_HEADS, SIZE, TOKENS, LAYERS = 8, 2, 8, 4096, 3


def config_of(name):
    config = getattr(transformers, name).config_class(**CONFIGS[name])
    config.architectures = [name]
    return config


def shapes(batch):
    return {name: (tuple(x.shape), x.dtype) for name, x in batch.items()}


def really_cut(name):
    model = AutoScheduledModel.from_config(config_of(name), auto_class=name, cp=2, dp=1).train()
    batch = training_batch(model, 2, 16)
    return shapes(cut_batch(model, TokenCut.of(model.mesh), batch, {})[0]), shapes(
        cut_example(model, batch, 2, model._slapo.schedule.state.positions)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_planner_dry_run_with_cp_uses_the_batch_keys_and_shapes_of_a_real_step(name):
    for real, planned in emulate(really_cut, name, mesh=(1, 1, 2)):
        assert planned == real


def llama(**changes):
    sizes = {"hidden_size": HEADS * SIZE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
             "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 64, "max_position_embeddings": TOKENS}  # fmt: skip
    return transformers.LlamaConfig(**sizes | changes, architectures=["LlamaForCausalLM"])


@functools.cache
def planner_of(padding):
    """Return the planner of tests that share its dry runs."""
    return Planner(llama(), HARDWARE["h100"], TOKENS, "bf16", padding=padding)


HEAD_BYTES = 2 * TOKENS * SIZE * 2  # of one head's keys, of all tokens of two rows
SENT = {  # way --> bytes of a block over cp=4: forward, backward, those in all-to-alls
    # keys and values gathered; gathered again, and their gradients reduced and scattered
    "gather": (2 * KV_HEADS * HEAD_BYTES, 4 * KV_HEADS * HEAD_BYTES, 0),
    # queries and outputs, keys and values of a head for each rank: a quarter each; and their gradients
    "ulysses": ((2 * HEADS + 8) * HEAD_BYTES / 4, (2 * HEADS + 8) * HEAD_BYTES / 4, (2 * HEADS + 8) * HEAD_BYTES / 4),
}  # fmt: skip


@pytest.mark.parametrize("way", SENT)
def test_planner_bytes_sent_over_cp_equal_the_known_bytes_of_each_attention_option(way):
    planner, cp = planner_of(False), 4
    block, expected = planner.profile(1, False, cp, way).units[2].few, SENT[way]
    found = block.forward.cut_comm, block.backward.cut_comm, block.forward.exchanged
    assert found == pytest.approx(expected, rel=0.02)
    step = planner.forecast(Layout(rows=2, cp=cp, cp_attention=way)).step
    assert step.cp_bytes >= LAYERS * sum(expected[:2]) * (cp - 1) / cp
    assert step.tp_bytes == step.pp_bytes == 0 < step.dp_bytes


def test_planner_counts_no_full_attention_mask_for_long_causal_sequences_with_cp(monkeypatch):
    """Masks are made for runs of 64 queries, here 16 of them; the number of runs is that of any number of rows."""
    monkeypatch.setattr(cut_gather, "RUN", 1)
    planner = Planner(llama(), HARDWARE["h100"], TOKENS, "bf16", padding=False)
    block = planner.profile(1, False, 4).units[2]
    assert len([p for p in block.few.forward.products if not p.n]) == TOKENS // 4 // (HEADS * SIZE)
    assert block.at(1).backward_peak < TOKENS * TOKENS // 4 * torch.bfloat16.itemsize


def test_planner_all_to_all_time_between_nodes_uses_the_bandwidth_of_the_slower_connection():
    """Count 8 of 16 ranks on other nodes: half of the bytes go over a rank's own card, 7 of 16 parts over links."""
    device = HARDWARE["h100"]
    assert device.per_node == 8
    assert exchange_seconds(device, 16, 1e9) == pytest.approx(5e8 / device.network)
    assert exchange_seconds(device, 8, 1e9) == pytest.approx(7e9 / 8 / device.link)
    assert exchange_seconds(device, 8, 1e9, stride=8) == pytest.approx(7e9 / 8 / device.network)
    assert exchange_seconds(device, 1, 1e9) == 0


def test_planner_search_tries_ulysses_only_where_cp_divides_the_heads():
    """Two heads of a tp rank cannot be shared by cp=4; a ring is not simulated."""
    config = llama(num_attention_heads=2, num_hidden_layers=1)
    found = Planner(config, HARDWARE["h100"], TOKENS * 2, "bf16", padding=False).search(4, 2)
    ways = {(f.layout.cp, f.layout.cp_attention) for f in found.feasible}
    assert {(2, "gather"), (2, "ulysses"), (4, "gather")} <= ways
    assert (4, "ulysses") not in ways
    assert ("tp=1 cp=4 ulysses", "cp=4 does not divide the 2 heads of a rank") in found.refused
    by_heads = next(f.layout for f in found.feasible if f.layout.cp_attention == "ulysses")
    assert by_heads.knobs()["cp_attention"] == "ulysses"
    with pytest.raises(MeshError, match="pass --cp-attention gather or ulysses"):
        Planner(config, HARDWARE["h100"], TOKENS).forecast(Layout(cp=2, cp_attention="ring"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", ["cpu", "a100"])
@pytest.mark.parametrize("way", SENT)
def test_planner_attention_dropout_memory_is_halved_by_cp_2_on_every_device(device, way):
    """A block of GPT-2, whose attention has dropout, keeps half of its activations and masks on cp=2."""
    planner = Planner(config_of("GPT2LMHeadModel"), HARDWARE[device], 64, "fp32")
    kept = [planner.profile(1, False, cp, way).units[3].few.kept for cp in (1, 2)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.05)


def test_planner_activation_memory_is_quartered_by_cp_4_and_weights_stay_replicated():
    """A block keeps a quarter of them on cp=4; parameters are whole on each rank unless dp_shard divides them."""
    planner = planner_of(False)
    kept = [planner.profile(1, False, cp).units[2].few.kept for cp in (1, 4)]
    assert kept[1] == pytest.approx(kept[0] / 4, rel=0.02)
    whole, quarter = (planner.forecast(Layout(cp=cp)).ranks[0] for cp in (1, 4))
    assert quarter.weights == whole.weights
    assert quarter.gradients == whole.gradients
    shared = planner.forecast(Layout(cp=4, dp_shard=4)).ranks[0]
    assert shared.optimizer == pytest.approx(quarter.optimizer / 4, rel=0.01)


def test_planner_search_chooses_cp_when_tp_pp_and_dp_cannot_shard_the_model():
    """A model of one head and one block cannot use tp or pp, and one row cannot use dp; only cp=2 fits the memory."""
    config = llama(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    planner = Planner(config, HARDWARE["h100"], TOKENS, "bf16")
    one, two = (planner.most_memory(Layout(cp=cp, checkpoint_ratio=1.0)) for cp in (1, 2))
    assert two < 0.7 * one
    tight = planner.on(
        replace(planner.hardware, memory=(one + two) / 2 + planner.hardware.reserved)
    )
    assert not tight.search(1, 1).feasible
    best = tight.search(2, 1).feasible[0].layout
    assert best.cp == 2 == best.devices
    assert best.knobs()["cp"] == 2
    assert not tight.search(1, 1, cut=False).feasible


def test_planner_search_chooses_no_cp_where_dp_can_shard_the_rows():
    found = Planner(llama(num_hidden_layers=2), HARDWARE["h100"], TOKENS, "bf16").search(2, 2)
    assert found.feasible[0].layout.cp == 1
    assert any(f.layout.cp == 2 for f in found.feasible)
    named = {f.layout.checkpoint_policy for f in found.feasible if f.layout.cp > 1}
    assert named == {""}  # the others are refused at the load


def test_planner_refuses_cp_for_a_model_class_not_known_to_train_right_with_cp():
    config = transformers.BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=64, architectures=["BloomForCausalLM"])  # fmt: skip
    planner = Planner(config, HARDWARE["h100"], TOKENS)
    assert all(f.layout.cp == 1 for f in planner.search(2, 2).feasible)
    with pytest.raises(Exception, match="not known to train right with tokens sharded over cp"):
        planner.profile(1, False, 2)


def test_planner_counts_no_attention_mask_for_causal_rows_without_padding():
    masked, bare = (planner_of(p).profile(1).units[2].few.kept for p in (True, False))
    assert masked - bare >= 2 * TOKENS * TOKENS * torch.bfloat16.itemsize  # of two rows
