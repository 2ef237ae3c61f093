"""Derived tables for parts of a model that the batch of the proof does not run, and for groups that stay unsharded."""

import re

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ResNetConfig,
    ResNetForImageClassification,
    SiglipVisionConfig,
    XGLMConfig,
    XGLMForCausalLM,
)

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.model.step.input_errors import InputError
from slapo_zoo.verify.derive import Search, derive
from slapo_zoo.verify.tiny_case import _with_all_kinds, tiny_case
from slapo_zoo.zoo.tiny_config import Sizes

IMAGE = 90
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def batch_of(images):
    """Return four rows with as many images of four tokens as `images` says."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, IMAGE, (4, 12), generator=g)
    for row, count in enumerate(images):
        ids[row, 1 : 1 + 4 * count] = IMAGE
    pixels = torch.randn(4, 3, 16, 16, generator=g)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": pixels}


def step(table, folder, config, mesh, images):
    tp, pp, _ = mesh
    model = AutoScheduledModel.from_pretrained(
        folder, config=config, tp=tp, pp=pp, schedule=table, kernels="reference", seed=0
    )
    loss = model.train().train_step(batch_of(images), micro_batches=2)
    return float(loss), model.consolidated_state_dict(grads=True)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)], ids=["tp2", "pp2"])
def test_schedule_derived_from_text_alone_trains_on_images_as_one_rank_does(mesh, tmp_path):
    vision = SiglipVisionConfig(**SIZES, image_size=16, patch_size=8, attention_dropout=0.5)
    text = LlamaConfig(**SIZES, vocab_size=96, pad_token_id=0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
    )
    case = tiny_case(config, LlavaForConditionalGeneration, tmp_path)
    search = Search(config, case, mesh, {})
    table = search.candidates()[0](config, search.small)
    truth = step(table, tmp_path, config, (1, 1, 1), [1, 1, 1, 1])
    found = emulate(step, table, tmp_path, config, mesh, [1, 1, 1, 1], mesh=mesh)[0]
    assert found[0] == pytest.approx(truth[0], rel=1e-5)
    for name, grad in truth[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-3, atol=1e-5, msg=name)
    with pytest.raises(
        InputError, match=r"pixel_values: .* do not fit .*\n  hint: pass micro_batches=1"
    ):
        emulate(step, table, tmp_path, config, mesh, [2, 1, 1, 0], mesh=mesh)


def test_schedule_derivation_that_leaves_experts_unsharded_may_still_split_the_batch():
    search = Search.__new__(Search)
    search.sizes, search.groups, search.left_whole = (2, 1, 1), ["experts", "mlp"], {}
    search.candidates = lambda: [search._structural, search._gathered]
    search._single_stacks = list
    search._probe = lambda make, sizes: "" if "experts" in search.left_whole else "wrong"
    assert next(make for make in search._attempts() if not search._probe(make, search.sizes))
    assert (search.undivided, list(search.left_whole)) == (False, ["experts"])


def test_schedule_derivation_over_two_dp_ranks_succeeds_for_a_batch_norm_model():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    assert derive(config, ResNetForImageClassification, (1, 1, 2)).table.batch_statistics


def generated(table, folder):
    model = AutoScheduledModel.from_pretrained(folder, tp=2, schedule=table)
    return model.generate(torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=4, do_sample=False)


def test_derived_table_that_shards_no_heads_generates_with_a_cache_of_all_heads(tmp_path):
    config = XGLMConfig(vocab_size=96, d_model=32, ffn_dim=64, num_layers=1, attention_heads=4)
    case = tiny_case(config, XGLMForCausalLM, tmp_path)
    search = Search(config, case, (2, 1, 1), {})
    table = search._structural(config, search.small)
    plain = XGLMForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    want = plain.generate(tokens, max_new_tokens=4, do_sample=False)
    for found in emulate(generated, table, tmp_path, mesh=(2, 1, 1)):
        assert torch.equal(found, want)


def test_tiny_model_has_layers_enough_for_experts_that_begin_after_dense_layers():
    """Their files hold each expert by itself, which a model without experts does not tell."""
    config = DeepseekV3Config(num_hidden_layers=5, first_k_dense_replace=3)
    assert _with_all_kinds(config, DeepseekV3ForCausalLM, Sizes()).layers == 4


def test_gradients_of_a_model_without_a_loss_are_proven(tmp_path):
    """The tp plan of transformers does not sum the gradients of norms that run on a rank's own heads."""
    config = Glm4MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        vocab_size=96,
        head_dim=8,
        use_qk_norm=True,
        first_k_dense_replace=2,
    )
    case = tiny_case(config, Glm4MoeModel, tmp_path)
    search = Search(config, case, (2, 1, 1), {})
    assert re.match(
        "gradients: layers.0.self_attn..*_norm.weight", search._probe(search._planned, (2, 1, 1))
    )
    assert search._probe(search._structural, (2, 1, 1)) == ""
