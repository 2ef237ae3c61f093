"""Costs of context parallelism: bytes that a rank gathers and scatters for each layer."""

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.parallel import collectives

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, TOKENS, ROWS = 4, 8, 2, 8, 512, 2
KINDS = {"all_gather", "reduce_scatter"}


def llama():
    sizes = {
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 224,
        "num_hidden_layers": LAYERS,
    }
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": 64}
    return transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=TOKENS)


def measured(cp):
    """Bytes of the tensors that this rank gathered or scattered over cp in a step, by kind."""
    model = AutoScheduledModel.from_config(
        llama(), auto_class="LlamaForCausalLM", cp=cp, dp=1, seed=0, kernels="reference"
    ).train()
    ids = torch.arange(TOKENS).remainder(64).expand(ROWS, -1).contiguous()
    batch, group, sent = {"input_ids": ids, "labels": ids}, model.mesh.group("cp"), []

    def note(kind, whole, over):
        if over is group and kind in KINDS and whole.is_floating_point():
            sent.append((kind, whole.nbytes))

    collectives.OBSERVERS.append(note)
    try:
        model.train_step(batch)
    finally:
        collectives.OBSERVERS.remove(note)
    return {kind: sum(n for k, n in sent if k == kind) for kind in sorted(KINDS)}


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_are_those_of_keys_and_values(cp):
    """Keys and values of each layer: gathered in the forward, their gradients reduced and scattered in the backward."""
    expected = LAYERS * 2 * ROWS * KV_HEADS * TOKENS * HEAD_SIZE * 4  # fp32
    for found in emulate(measured, cp, mesh=(1, 1, cp)):
        assert found == pytest.approx(dict.fromkeys(sorted(KINDS), expected), rel=0.02)
