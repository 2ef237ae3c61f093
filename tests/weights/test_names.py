"""Matching of checkpoint keys of all releases with the model's tensors."""

import pytest
import torch

from slapo_zoo.parallel.local_tensors import Rows, rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights.keys import KeyMap, Pieces
from slapo_zoo.weights.names import match_names

GPT2 = ["transformer.wte.weight", "transformer.h.0.attn.c_attn.bias", "transformer.ln_f.weight"]
TIED = {"lm_head.weight": "transformer.wte.weight"}
HEAD = [*GPT2, "lm_head.weight"]


def bare(names):
    return [name.removeprefix("transformer.") for name in names]


def test_old_gpt2_keys_without_prefix_map_to_model_names_and_mask_buffers_are_ignored():
    found = [*bare(GPT2), "h.0.attn.bias", "h.0.attn.masked_bias"]
    names = match_names(HEAD, found, "transformer", tied=TIED)
    assert names.source == dict(zip(HEAD, [*bare(GPT2), "wte.weight"], strict=True))
    assert names.missing == names.unexpected == []


def test_keys_of_a_checkpoint_with_head_map_to_the_base_model_and_the_head_is_unexpected():
    names = match_names(bare(GPT2), [*GPT2, "score.weight"], "transformer")
    assert names.source == dict(zip(bare(GPT2), GPT2, strict=True))
    assert names.missing == []
    assert names.unexpected == ["score.weight"]


def test_gpt_neo_mask_buffers_are_ignored_unless_the_model_has_them():
    mask = "transformer.h.0.attn.attention.bias"
    assert match_names([], [mask], "transformer").unexpected == []
    assert match_names([mask], [mask], "transformer").source == {mask: mask}


def test_checkpoint_keys_gamma_and_beta_of_bert_map_to_weight_and_bias():
    expected = [f"bert.embeddings.LayerNorm.{leaf}" for leaf in ("weight", "bias")]
    found = ["bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.beta"]
    names = match_names(expected, [*found, "bert.embeddings.position_ids"], "bert")
    assert names.source == dict(zip(expected, found, strict=True))
    assert names.unexpected == []
    stripped = [key.removeprefix("bert.") for key in found]
    assert match_names(expected, stripped, "bert").source == dict(
        zip(expected, stripped, strict=True)
    )


def test_checkpoint_key_gamma_of_a_module_that_is_no_norm_is_not_renamed():
    assert match_names(["ls.weight"], ["ls.gamma"]).unexpected == ["ls.gamma"]


@pytest.mark.parametrize("held", [TIED.keys(), TIED.values(), [*TIED.keys(), *TIED.values()]])
def test_tied_parameter_maps_to_the_checkpoint_key_of_either_name(held):
    rest = GPT2[1:]
    names = match_names(HEAD, [*held, *rest], "transformer", tied=TIED)
    assert names.missing == names.unexpected == []
    assert {names.source[name] for name in ("lm_head.weight", GPT2[0])} == set(held)


def test_tied_parameter_maps_to_the_checkpoint_key_of_a_tied_name_that_the_model_lacks():
    names = match_names(GPT2, HEAD, "transformer", tied=TIED)
    assert names.unexpected == []
    names = match_names(GPT2, HEAD[1:], "transformer", tied=TIED)
    assert names.source[GPT2[0]] == "lm_head.weight"


def test_chain_of_tied_parameter_names_maps_to_the_one_stored_key():
    tied = {"encoder.e": "shared", "decoder.e": "encoder.e", "lm_head": "shared"}
    expected = ["shared", *tied]
    for held in expected:
        assert match_names(expected, [held], tied=tied).source == dict.fromkeys(expected, held)


def test_matching_of_circular_tied_parameter_names_terminates():
    assert match_names(["a", "b"], ["a"], tied={"a": "b", "b": "a"}).source["a"] == "a"


@pytest.mark.parametrize("found", [["h.0.w", "transformer.h.0.w"], ["transformer.h.0.w", "h.0.w"]])
def test_checkpoint_key_equal_to_the_parameter_name_is_preferred_to_a_renamed_key(found):
    names = match_names(["transformer.h.0.w"], found, "transformer")
    assert names.source == {"transformer.h.0.w": "transformer.h.0.w"}
    assert names.unexpected == ["h.0.w"]


def test_matching_of_checkpoint_keys_lists_missing_unexpected_and_ignored_keys():
    names = match_names(["a", "b"], ["b", "c", "x.1"], ignore=[r"^x\."])
    assert names.source == {"b": "b"}
    assert names.missing == ["a"]
    assert names.unexpected == ["c"]


def test_rotary_frequency_buffers_in_a_checkpoint_are_ignored():
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert match_names([], [key], "model").unexpected == []


def test_matching_of_checkpoint_keys_reports_a_tied_tensor_stored_twice():
    names = match_names(HEAD, HEAD, "transformer", tied=TIED)
    assert names.doubles == [("transformer.wte.weight", "lm_head.weight")]
    assert match_names(HEAD, GPT2, "transformer", tied=TIED).doubles == []


def test_key_rename_maps_a_tensor_repeated_per_layer_in_old_files_to_one_model_tensor():
    """ESM-2's files repeat one tensor per layer: a `*` in the rename reads it from any layer."""
    keys = KeyMap((("layer.*.rotary.", "rotary."),))
    for key in (
        "esm.layer.*.rotary.inv_freq",
        "esm.layer.0.rotary.inv_freq",
        "esm.layer.11.rotary.inv_freq",
    ):
        assert keys.to_model(key) == "esm.rotary.inv_freq"
    assert keys.to_file("esm.rotary.inv_freq") == "esm.layer.*.rotary.inv_freq"
    assert keys.to_model("esm.layer.0.key.weight") == "esm.layer.0.key.weight"


def test_dp_shard_of_a_fused_tensor_is_split_at_the_boundaries_of_the_file_tensors():
    """The model's tensor joins three tensors of the file along axis 0; this rank holds rows 4..7."""
    keys = KeyMap((), (Pieces("conv.weight", ("q.weight", "k.weight", "v.weight")),))
    spec = TensorSpec("conv.weight", (9, 2), "float32")
    whole = torch.arange(18.0).reshape(9, 2)
    own = whole[4:8].clone()
    own.dp_rows, mesh = Rows(4, 4), Mesh(dp=2, rank=1)
    found = keys.split({"conv.weight": own}, [spec], mesh)
    for i, (name, view) in enumerate(found.items()):
        rows = rows_of(view)
        assert rows.count == [0, 2, 2][i], name
        assert torch.equal(view, whole[3 * i :][rows.first : rows.first + rows.count])
