"""Costs of context parallelism: bytes that a rank sends for each layer, and its peak memory in a step."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from slapo_zoo import emulate
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.parallel.token_cut import WAYS

CI = str(Path(__file__).resolve().parents[2] / "ci")
MODELS = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration")
QUICK = ("LlamaForCausalLM", True, "gather")


@pytest.fixture
def costs():
    sys.path.insert(0, CI)
    try:
        yield importlib.import_module("benchmarks.cut_costs")
    finally:
        sys.path.remove(CI)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_that_attention_sends_are_those_of_the_formula(cp, way, costs):
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
def test_peak_of_a_step_shrinks_with_cp(cls, padded, way, costs):
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


@pytest.mark.parametrize("way", WAYS[1:])
def test_mask_without_padding_costs_nothing(way, costs):
    """All cp ranks know before the step whether a row has padding; only then a mask is made."""
    for found in emulate(masked_elements, costs, way, False, 2, mesh=(1, 1, 2)):
        assert found == [0] * costs.LAYERS
    for found in emulate(masked_elements, costs, way, True, 2, mesh=(1, 1, 2)):
        assert min(found) > 0
