"""Dropout from seeds, as on a GPU: fused or explicit, with kernels or without, on one rank or two, equal results."""

import math

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream

P = 0.2
BERT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2,
        "vocab_size": 40, "hidden_dropout_prob": P, "attention_probs_dropout_prob": P}  # fmt: skip
CONFIGS = {
    "gpt2": ("GPT2LMHeadModel", {
        "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 40, "embd_pdrop": P, "attn_pdrop": P, "resid_pdrop": P,
        "bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM"}),
    "bert": ("BertForMaskedLM", BERT),
    "opt": ("OPTForCausalLM", {
        "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48, "num_hidden_layers": 2, "vocab_size": 40,
        "word_embed_proj_dim": 32, "dropout": P, "attention_dropout": P}),
    "gpt_neo": ("GPTNeoForCausalLM", {
        "hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "window_size": 5, "vocab_size": 40, "intermediate_size": 48, "attention_dropout": P, "resid_dropout": P,
        "embed_dropout": P, "bos_token_id": 1, "eos_token_id": 2}),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2, "vocab_size": 40, "dropout_rate": P,
        "decoder_start_token_id": 0, "pad_token_id": 0}),
}  # fmt: skip
KERNELS = {
    "bert": ["bias_dropout_residual_layer_norm", "embedding_layer_norm"],
    "gpt_neo": ["local_causal_attention"],
    "t5": ["t5_attention", "relu_dropout"],
}


def model_of(name, kernels="reference", tp=1):
    cls, sizes = CONFIGS[name]
    config = getattr(transformers, cls).config_class(**sizes)
    config.architectures = [cls]
    return AutoScheduledModel.from_config(config, tp=tp, seed=5, kernels=kernels).train()


def batch_of(name, padded=False):
    ids = torch.arange(3, 3 + 24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        batch |= {"attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
    return batch


def step_of(model, batch):
    """Return loss and unsharded gradients of the second step."""
    for _ in range(2):
        model.zero_grad()
        loss = model.train_step(batch)
    return float(loss), model.consolidated_state_dict(grads=True)


def explicit(model):
    """Use explicit attention: probabilities and a mask of their size in memory."""
    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.device_dropout = None
    return model


def assert_same(found, want, tolerance=2e-5):
    assert math.isclose(found[0], want[0], rel_tol=tolerance)
    least = 1e-2 * max(
        float(g.abs().max()) for g in want[1].values()
    )  # a key's bias has no gradient
    for name, g in want[1].items():
        scale = max(float(g.abs().max()), least)
        torch.testing.assert_close(found[1][name], g, atol=tolerance * scale, rtol=1e-3, msg=name)


@pytest.fixture
def by_seeds(monkeypatch):
    monkeypatch.setattr(RandomStream, "draws_in_blocks", staticmethod(lambda device: False))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt_neo"])  # it has no seam
def test_attention_with_dropout_from_seeds_has_the_gradients_of_explicit_masks(
    name, padded, by_seeds, monkeypatch
):
    batch = batch_of(name, padded)
    want = step_of(explicit(model_of(name)), batch)
    model = model_of(name)
    assert any(isinstance(m, CoreAttention) for m in model.modules())
    monkeypatch.setattr(RandomStream, "keep_mask", None)  # no mask is made anywhere
    assert_same(step_of(model, batch), want)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_with_dropout_from_seeds_have_the_gradients_of_explicit_masks(
    name, padded, by_seeds, monkeypatch
):
    batch = batch_of(name, padded)
    want = step_of(explicit(model_of(name)), batch)
    monkeypatch.setattr(RandomStream, "keep_mask", None)
    assert_same(step_of(model_of(name, KERNELS[name]), batch), want)


def test_unpadded_encoder_with_dropout_from_seeds_has_the_gradients_of_the_padded_run(
    by_seeds, monkeypatch
):
    batch = batch_of("bert", padded=True)
    want = step_of(explicit(model_of("bert")), batch)
    monkeypatch.setattr(RandomStream, "keep_mask", None)
    monkeypatch.setattr(RandomStream, "cells", None)  # nor are seeds made on the host
    assert_same(step_of(model_of("bert", ["unpadded_encoder"]), batch), want)


def of_rank(name, kernels, tp):
    RandomStream.draws_in_blocks = staticmethod(lambda device: False)
    try:
        return step_of(model_of(name, kernels, tp), batch_of(name, True))
    finally:
        RandomStream.draws_in_blocks = staticmethod(lambda device: device.type == "cpu")


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_from_seeds_on_two_ranks_gives_the_gradients_of_one_rank(name, ranks):
    kernels = KERNELS.get(name, "reference")
    (want,), found = (
        ranks.run(of_rank, 1, name, kernels, 1),
        ranks.run(of_rank, 2, name, kernels, 2),
    )
    assert found[0][0] == found[1][0]
    assert_same(found[0], want)
