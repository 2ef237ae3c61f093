"""Calls copied from `transformers` scripts: they run, or the error names the one change."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from parity import Case, batch_of, checkpoint
from refusals import refused
from slapo_zoo import AutoScheduledModel, SlapoError, load_checkpoint, save_checkpoint
from slapo_zoo.weights.training_folder import damages_of

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
BERT = Case("BertForSequenceClassification", ("class",), (("num_labels", 3),))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("arguments")


def logits(model, case):
    with torch.no_grad():
        return model.eval()(**batch_of(case)).logits


PASTED = {
    "token": "hf_x",
    "cache_dir": "/nowhere",
    "local_files_only": True,
    "force_download": False,
    "device_map": None,
    "low_cpu_mem_usage": True,
    "use_safetensors": True,
    "attn_implementation": "eager",
    "torch_dtype": torch.float64,
    "subfolder": "",
    "quantization_config": None,
    "use_kernels": False,
    "load_in_8bit": False,
    "generation_config": transformers.GenerationConfig(max_new_tokens=7),
}


def test_from_pretrained_with_transformers_arguments_gives_the_logits_of_plain_transformers(root):
    folder = checkpoint(GPT2, root)
    model = AutoScheduledModel.from_pretrained(folder, **PASTED)
    plain = transformers.GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    assert next(model.parameters()).dtype == torch.float64
    assert model.generation_config.max_new_tokens == 7
    torch.testing.assert_close(logits(model, GPT2), logits(plain, GPT2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_implementation": "paged"}, "attention="),
        ({"attn_implementation": {"": "eager"}}, "attention="),
        ({"attn_implementation": "eager", "attention": "sdpa"}, "attention="),
        ({"device_map": "auto"}, "device="),
        ({"use_kernels": True}, "pass kernels="),
        ({"key_mapping": {"a": "b"}}, "rename the tensors"),
        ({"use_safetensors": False}, "allow_pickle=True"),
        ({"state_dict": {}}, "files of the checkpoint"),
        ({"config": {"n_layer": 3}}, "found a dict, expected a config"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_unsupported_transformers_argument_is_refused_with_hint(options, words, root):
    assert words in refused(SlapoError, checkpoint(GPT2, root), **options)


def test_config_passed_to_from_pretrained_overrides_the_checkpoint_config(root):
    folder = checkpoint(GPT2, root)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.scale_attn_weights = False
    for given in (config, None):
        plain = transformers.GPT2LMHeadModel.from_pretrained(
            folder, config=given, layer_norm_epsilon=1e-3
        ) if given is None else transformers.GPT2LMHeadModel.from_pretrained(folder, config=given)  # fmt: skip
        mine = {"layer_norm_epsilon": 1e-3} if given is None else {}
        model = AutoScheduledModel.from_pretrained(folder, config=given, **mine)
        torch.testing.assert_close(logits(model, GPT2), logits(plain, GPT2), rtol=1e-4, atol=1e-4)
    text = refused(SlapoError, folder, config=config, no_such=1)
    assert "no such field" in text


def test_from_pretrained_without_architectures_or_with_two_dtypes_resolves_as_transformers_does(
    root,
):
    folder = checkpoint(GPT2, root)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.architectures = None
    model = AutoScheduledModel.from_pretrained(
        folder, config=config, dtype="bfloat16", torch_dtype=torch.float64, subfolder=None
    )
    assert (type(model).__name__, model.dtype) == (GPT2.cls, torch.bfloat16)
    assert AutoScheduledModel.from_pretrained(folder, dtype=None).dtype == torch.float32


def fresh_head(folder, layout, options):
    model = AutoScheduledModel.from_pretrained(folder, **layout, **options)
    return logits(model, BERT), model.ledger.newly_initialized, model.consolidated_state_dict()


def test_num_labels_unlike_the_checkpoint_is_refused_unless_ignore_mismatched_sizes_is_set(
    root, ranks
):
    """5 labels on a checkpoint of 3: the error names the flag; with the flag a new head is initialised."""
    folder = checkpoint(BERT, root)
    assert "ignore_mismatched_sizes=True" in refused(SlapoError, folder, num_labels=5)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True, "seed": 0}
    want, new, weights = fresh_head(folder, {}, options)
    assert sorted(new) == ["classifier.bias", "classifier.weight"]
    assert want.shape == (4, 5)
    old = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[n], old[n]) for n in old if "classifier" not in n)
    for layout in ({"tp": 2}, {"pp": 2}):
        for found, _, _ in ranks.run(fresh_head, 2, folder, layout, options):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def saved(folder, out, layout, options):
    AutoScheduledModel.from_pretrained(folder, **layout).save_pretrained(out, **options)


@pytest.mark.parametrize("size", ["5GB", 9000], ids=["one file", "sharded"])
def test_arguments_variant_and_subfolder_select_the_files_that_are_loaded_and_saved(
    size, root, tmp_path, ranks
):
    folder, out = checkpoint(GPT2, root), tmp_path / "all" / "inner"
    options = {"variant": "fp16", "is_main_process": True, "safe_serialization": True,
               "state_dict": None, "max_shard_size": size}  # fmt: skip
    ranks.run(saved, 2, folder, out, {"tp": 2}, options)
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder)
    names = {path.name for path in out.iterdir()}
    plain.save_pretrained(tmp_path / "plain", variant="fp16", max_shard_size=size)
    assert {p.name for p in (tmp_path / "plain").iterdir() if "model" in p.name} <= names
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "all", subfolder="inner", variant="fp16")  # fmt: skip
    mine = AutoScheduledModel.from_pretrained(tmp_path / "all", subfolder="inner", variant="fp16")
    for name, p in plain.named_parameters():
        assert torch.equal(again.get_parameter(name), p)
        assert torch.equal(mine.get_parameter(name), p)


def test_saving_a_variant_keeps_other_weights_and_training_state_in_the_folder(root, tmp_path):
    model = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root))
    save_checkpoint(model, tmp_path / "all", step=3)
    for size in (9000, "5GB"):  # the second variant replaces the files of the first
        model.save_pretrained(tmp_path / "all", size, variant="half", dtype="float16")
    names = {path.name for path in (tmp_path / "all").glob("*.safetensors*")}
    assert names == {"model.safetensors", "model.half.safetensors"}
    assert load_checkpoint(model, tmp_path / "all").step == 3
    assert damages_of(tmp_path / "all")[1] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"safe_serialization": False}, "safetensors"),
        ({"state_dict": {}}, "save_file"),
        ({"flavour": 1}, "no such argument"),
    ],
    ids=["pickle", "state_dict", "unknown"],
)
def test_unsupported_save_pretrained_argument_is_refused_with_hint(options, words, root, tmp_path):
    model = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root))
    with pytest.raises(SlapoError, match=words):
        model.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_resize_token_embeddings_of_a_scheduled_model_is_refused(root):
    model = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root))
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(99) is model.get_input_embeddings()
    with pytest.raises(SlapoError, match="load that folder"):
        model.resize_token_embeddings(120)


def test_quantized_checkpoint_is_refused_with_an_error_that_says_quantized(root, tmp_path):
    folder = shutil.copytree(checkpoint(GPT2, root), tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    named = {**config, "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(named))
    assert "quantized (fp8)" in refused(SlapoError, folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    key = "transformer.h.0.mlp.c_fc"
    tensors |= {f"{key}.weight": tensors[f"{key}.weight"].to(torch.int8), f"{key}.SCB": torch.ones(70)}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "quantized" in refused(SlapoError, folder)
