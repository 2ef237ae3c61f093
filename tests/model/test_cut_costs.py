"""Bytes that a rank sends in a step with cp= and with dp_shard=, and its peak memory with cp=: counts, not times."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from slapo_zoo import emulate
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.parallel.token_cut import WAYS

CI = str(Path(__file__).resolve().parents[2] / "ci")
MODELS = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "OPTForCausalLM",
)
QUICK = ("LlamaForCausalLM", True, "gather")


@pytest.fixture
def benchmark():
    """Return `importlib.import_module` for names within ci/."""
    sys.path.insert(0, CI)
    yield importlib.import_module
    sys.path.remove(CI)


@pytest.fixture
def costs(benchmark):
    return benchmark("benchmarks.cut_costs")


def test_dp_shard_step_sends_no_more_bytes_than_fsdp2(benchmark):
    """`ci/run.py bench zero` measures times."""
    zero = benchmark("benchmarks.zero")
    for found in zero.on_ranks(zero.measured, zero.RANKS, 32, 3, "bf16", 0):
        (mine, _), (theirs, _) = found["ours"], found["FSDP2"]
        parameters = sum(p.numel() for p in zero.plain(zero.config_of(32, 3)).parameters())
        assert theirs > parameters * (2 + 4) / zero.RANKS  # counted at all
        assert mine <= zero.MOST_BYTES * theirs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_sent_by_attention_with_cp_equal_the_documented_formula(cp, way, costs):
    """gather: keys and values twice, since a rank saves its own alone for the backward, their gradients once; ulysses:
    queries, keys, values, outputs and their gradients; ring: keys and values twice, their gradients once more."""
    for found in emulate(costs.sent, cp, way, mesh=(1, 1, cp)):  # and counts of targets
        assert found == pytest.approx(costs.formula(cp, way), rel=costs.OFF, abs=256)


@pytest.mark.parametrize(
    ("cls", "padded", "way"),
    [
        pytest.param(*cell, marks=() if cell == QUICK else pytest.mark.slow)
        for cls in MODELS for padded in (False, True) for cell in ((cls, padded, way) for way in WAYS)
    ],
)  # fmt: skip
def test_peak_memory_of_a_train_step_shrinks_with_cp(cls, padded, way, costs):
    """At most 1.1 / cp of one rank's peak."""
    one = costs.peak(cls, padded, 1)
    for cp in (2, 4):
        for found in emulate(costs.peak, cls, padded, cp, cp_attention=way, mesh=(1, 1, cp)):
            assert found <= 1.1 * one / cp


def masked_elements(costs, way, padded, cp):
    """Elements of the mask of each layer in a step whose batch has a mask [rows, tokens]."""
    model, seen = costs.model_of("GPT2LMHeadModel", cp, cp_attention=way), []
    batch = costs.batch_of("GPT2LMHeadModel", True)
    if not padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])

    def note(_module, given):
        seen.append(0 if given[3] is None else given[3].numel())

    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.register_forward_pre_hook(note)
    model.train_step(batch)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_attention_with_cp_makes_no_mask_for_batches_without_padding(way, costs):
    """All cp ranks know before the step whether a row has padding; only then a mask is made."""
    for found in emulate(masked_elements, costs, way, False, 2, mesh=(1, 1, 2)):
        assert found == [0] * costs.LAYERS
    for found in emulate(masked_elements, costs, way, True, 2, mesh=(1, 1, 2)):
        assert min(found) > 0
