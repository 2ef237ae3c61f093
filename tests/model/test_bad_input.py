"""Bad input: an error in four parts before any work, and no partial changes."""

import errno
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from parity import batch_of, checkpoint
from refusals import BERT, GPT2, refused
from slapo_zoo import (
    ArchitectureError,
    AutoScheduledModel,
    MeshError,
    RankError,
    SlapoError,
    WeightsError,
    emulate,
    save_checkpoint,
)
from slapo_zoo.zoo.table import families


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {"gpt2": checkpoint(GPT2, root), "bert": checkpoint(BERT, root)}


@pytest.fixture
def folders(sources, tmp_path):
    """Return copies of the checkpoints that a test may change."""
    return {name: shutil.copytree(path, tmp_path / name) for name, path in sources.items()}


# --- mesh and architecture ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "options", "found"),
    [
        (1, {"tp": 2}, "found 1 process, expected tp * pp * dp = 2 * 1 * 1"),
        (1, {"dp": 3}, "found 1 process, expected tp * pp * dp = 1 * 1 * 3"),
        (2, {"tp": 2, "pp": 2}, "found 2 processes, expected tp * pp * dp = 2 * 2 * 1"),
        (3, {"tp": 2}, "found 3 processes, expected tp * pp * dp = 2 * 1 * 1"),
        (2, {"tp": 1, "dp": 1}, "found 2 processes, expected tp * pp * dp = 1 * 1 * 1"),
    ],
)
def test_mesh_whose_size_differs_from_the_number_of_processes_is_refused(
    n, options, found, sources, ranks
):
    text = refused(MeshError, sources["gpt2"], ranks, n, **options)
    assert "world size" in text
    assert found in text
    assert "torchrun --nproc-per-node" in text


@pytest.mark.parametrize("bad", [0, -2, 1.5, "two"])
@pytest.mark.parametrize("name", ["tp", "pp", "dp"])
def test_mesh_size_that_is_not_a_positive_integer_is_refused(name, bad, sources):
    text = refused(MeshError, sources["gpt2"], **{name: bad})
    assert f"mesh | {name} | found {bad!r}, expected an integer of at least 1" in text


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_tp_larger_than_the_number_of_heads_is_refused(name, sources, ranks):
    """A model of five heads allows tp = 1..5: the message lists the legal sizes."""
    text = refused(SlapoError, sources[name], ranks, 6, tp=6)
    assert "5 heads cannot be sharded over tp=6" in text
    assert "legal sizes of tp: [1, 2, 3, 4, 5]" in text
    assert "attn" in text or "attention" in text


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_more_pipeline_stages_than_transformer_blocks_are_refused(name, sources, ranks):
    text = refused(MeshError, sources[name], ranks, 4, pp=4)
    assert "mesh | pp=4 | 4 stages, but the model has 3 blocks" in text
    assert "choose pp between 1 and 3" in text


def test_model_type_without_a_schedule_is_refused(folders):
    """The architecture exists in transformers and has no table in the zoo."""
    path = folders["bert"] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "mobilebert", "architectures": ["MobileBertForMaskedLM"]}))  # fmt: skip
    text = refused(ArchitectureError, folders["bert"])
    assert "model_type='mobilebert'" in text
    assert all(name in text for name in families())
    assert "schedules/mobilebert.py" in text
    assert "CONTRIBUTING.md" in text
    with pytest.raises(ArchitectureError, match="schedules/mpt"):
        AutoScheduledModel.from_config(transformers.MptConfig())


@pytest.mark.parametrize(
    ("auto_class", "problem"),
    [
        ("GPT5LMHeadModel", "transformers has no class of that name"),
        ("AutoModelForMaskedLM", "this Auto class has no model class for GPT2Config"),
    ],
)
def test_unknown_or_mismatched_auto_class_is_refused(auto_class, problem, sources):
    text = refused(ArchitectureError, sources["gpt2"], auto_class=auto_class)
    assert auto_class in text
    assert problem in text


@pytest.mark.parametrize("dtype", ["float33", "int8", "nn", 16, torch.int64])
def test_dtype_argument_with_an_unknown_name_is_refused(dtype, sources):
    text = refused(SlapoError, sources["gpt2"], dtype=dtype)
    assert f"dtype={dtype!r}" in text
    assert '"bfloat16"' in text


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_checkpoint_ratio_argument_out_of_range_is_refused(ratio, sources):
    text = refused(MeshError, sources["gpt2"], checkpoint_ratio=ratio)
    assert f"checkpoint_ratio={ratio} | expected a number from 0 to 1" in text


def test_from_pretrained_with_a_missing_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no such folder" in refused(SlapoError, "no_such_org/no_such_model")
    assert "no such folder" in refused(SlapoError, str(tmp_path / "nowhere"))


# --- train_step ---------------------------------------------------------------------------------


# batch, micro_batches, and of the error: the argument, the problem, the hint
BAD_STEPS = [
    ("good", 3, "micro_batches", "4 rows cannot be divided into 3 equal micro-batches", "[1, 2, 4]"),
    ("good", 8, "micro_batches", "4 rows cannot be divided into 8", "[1, 2, 4]"),
    ("good", -1, "micro_batches", "4 rows cannot be divided into -1", "[1, 2, 4]"),
    ("good", 1.5, "micro_batches", "4 rows cannot be divided into 1.5", "[1, 2, 4]"),
    ("no labels", None, "batch", "no loss", "labels"),
    ("listed labels", None, "batch", "found labels in a list", "labels"),
    ("empty", None, "batch", "no tensor", "input_ids"),
    ("list", None, "batch", "found a list", "tokenizer"),
]  # fmt: skip


def bad_steps(folder, options):
    """Return of each bad step its error, the gradients that it left, and the loss of a good step after it."""
    model = AutoScheduledModel.from_pretrained(folder, **options).train()
    good, found = batch_of(GPT2), []
    without = {k: v for k, v in good.items() if k != "labels"}
    for batch, micro_batches, *_ in BAD_STEPS:
        listed = {**without, "labels": [{"boxes": good["labels"]}]}
        given = {
            "good": good,
            "no labels": without,
            "listed labels": listed,
            "empty": {},
            "list": [1],
        }[batch]
        with pytest.raises(SlapoError) as caught:
            model.train_step(given, micro_batches=micro_batches)
        error = caught.value
        left = [n for n, p in model.named_parameters() if p.grad is not None]
        parts = error.where, str(error.what), error.problem, error.hint
        found.append((*parts, left, float(model.train_step(good))))
        model.zero_grad()
    return found


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_invalid_train_step_arguments_are_refused_on_every_rank(tp, pp, sources, ranks):
    """Every rank raises before any work: no gradient is left and the next step succeeds."""
    results = ranks.run(bad_steps, tp * pp, sources["gpt2"], {"tp": tp, "pp": pp})
    model = transformers.GPT2LMHeadModel.from_pretrained(sources["gpt2"])
    want = float(model(**batch_of(GPT2)).loss.detach())
    for found in results:
        for case, step in zip(BAD_STEPS, found, strict=True):
            where, what, text, advice, left, loss = step
            assert (where, what) == ("train_step", case[2])
            assert case[3] in text
            assert case[4] in advice
            assert left == []
            assert loss == pytest.approx(want, rel=1e-4)


def without_a_head(tp, pp):
    model = AutoScheduledModel.from_config(
        transformers.GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=32), tp=tp, pp=pp
    )
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(SlapoError, match=r"GPT2Model has no head.*\n.*auto_class="):
        model.train().train_step({"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2)])
def test_train_step_of_a_base_model_without_head_raises(tp, pp, ranks):
    ranks.run(without_a_head, tp * pp, tp, pp)


# --- saving -------------------------------------------------------------------------------------


def save_on_a_full_disk(folder, out):
    model = AutoScheduledModel.from_pretrained(folder, tp=2)
    model.save_pretrained(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    real = os.pwrite
    if dist.get_rank() == 1:
        os.pwrite = no_space
    try:
        model.save_pretrained(out)
    except SlapoError as error:
        return type(error), str(error), {p.name: p.read_bytes() for p in out.iterdir()} == before
    finally:
        os.pwrite = real
    return None


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_save_on_a_full_disk_keeps_the_old_folder(sources, tmp_path, ranks):
    first, second = ranks.run(save_on_a_full_disk, 2, sources["gpt2"], tmp_path / "out")
    assert (first[0], second[0]) == (RankError, WeightsError)
    for _, text, intact in (first, second):
        assert "No space left on device" in text
        assert "bytes of free space" in text
        assert "the folder is unchanged" in text
        assert intact
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(sources["gpt2"] / "model.safetensors")
    assert loaded.keys() == want.keys()
    assert all(torch.equal(loaded[key], want[key]) for key in want)


def save_a_diverged_model(folder, out, tp, dp, options):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, dp=dp, **options)
    save_checkpoint(model, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    model.transformer.h[1].mlp.c_fc.bias.data[-1] = float("inf")
    for save in (model.save_pretrained, lambda to: save_checkpoint(model, to)):
        with pytest.raises(SlapoError, match=r"NaN or infinity|c_fc\.bias") as caught:
            save(out)
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    model.save_pretrained(out.with_name("another"))
    save_checkpoint(model, out, check_finite=False)
    return str(caught.value)


@pytest.mark.parametrize(("tp", "dp", "options"), [(1, 1, {}), (2, 1, {}), (1, 2, {"dp_shard": 2})])
def test_save_of_nan_weights_does_not_replace_a_checkpoint(sources, tmp_path, tp, dp, options):
    """A diverged run must not overwrite its last good checkpoint with NaN."""
    out, mesh = tmp_path / "out", (tp, 1, dp)
    emulate(save_a_diverged_model, sources["gpt2"], out, tp, dp, options, mesh=mesh)
    for folder in (out, tmp_path / "another"):
        written = load_file(folder / "model.safetensors")["transformer.h.1.mlp.c_fc.bias"]
        assert not written.isfinite().all()


def test_unknown_argument_of_save_pretrained_raises(sources, tmp_path):
    model = AutoScheduledModel.from_pretrained(sources["gpt2"])
    with pytest.raises(SlapoError, match="quantize") as caught:
        model.save_pretrained(tmp_path / "out", quantize="int8")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


# --- names that a person types --------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:99", "gpu", 3.5])
def test_device_argument_that_names_an_unavailable_device_is_refused(device, sources):
    assert "device=" in refused(SlapoError, sources["gpt2"], device=device)


def test_model_folder_without_config_json_is_refused(folders, tmp_path):
    (folders["gpt2"] / "config.json").unlink()
    assert "no config can be read" in refused(SlapoError, folders["gpt2"])
    (tmp_path / "empty").mkdir()
    assert "pass a folder with config.json" in refused(SlapoError, tmp_path / "empty")


def test_seed_argument_that_is_not_an_integer_is_refused(sources):
    assert "expected an integer, or None" in refused(SlapoError, sources["gpt2"], seed="one")


# --- tokens that a model has no row for -----------------------------------------------------------

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31, "hidden_size": 16}
SHORT = {  # config, the longest row
    "gpt2": (transformers.GPT2Config(**SIZES, n_positions=8, bos_token_id=1, eos_token_id=2, architectures=["GPT2LMHeadModel"]), 8),
    "opt": (transformers.OPTConfig(**SIZES, ffn_dim=32, max_position_embeddings=8, word_embed_proj_dim=16, architectures=["OPTForCausalLM"]), 8),
    "roberta": (transformers.RobertaConfig(**SIZES, intermediate_size=32, max_position_embeddings=10, architectures=["RobertaForMaskedLM"]), 8),
    "bert": (transformers.BertConfig(**SIZES, intermediate_size=32, max_position_embeddings=8, architectures=["BertForMaskedLM"]), 8),
}  # fmt: skip


@pytest.mark.parametrize("family", SHORT)
def test_token_ids_beyond_the_vocabulary_raise_and_are_named(family):
    config, longest = SHORT[family]
    model = AutoScheduledModel.from_config(config, seed=0)
    long, beyond = torch.arange(longest + 1)[None] + 3, torch.tensor([[3, 40]])
    as_floats = beyond.float(), "numbers of torch.float32, expected token ids of an integer type"
    for ids, said in ((long, "rows of 9 tokens"), (beyond, "ids 3..40, expected 0..30"), as_floats):
        for call in (
            lambda ids=ids: model.train().train_step({"input_ids": ids, "labels": ids}),
            lambda ids=ids: model.eval()(input_ids=ids),
        ):
            with pytest.raises(IndexError, match=said) as caught:
                call()
            assert isinstance(caught.value, SlapoError)
    assert model(input_ids=long[:, :-1]).logits.shape == (1, longest, 31)


def test_torch_errors_in_the_forward_with_other_causes_are_raised_unchanged():
    model = AutoScheduledModel.from_config(SHORT["gpt2"][0], seed=0)
    ids = torch.ones(1, 8, dtype=torch.long)  # as many as there are positions
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        model(input_ids=ids, position_ids=ids[:, :3])
    assert not isinstance(caught.value, SlapoError)


def test_unknown_argument_of_from_config_raises_and_names_the_nearest_argument():
    with pytest.raises(SlapoError, match=r"from_config: sequence_parallell=[\s\S]*nearest: sequence_parallel"):  # fmt: skip
        AutoScheduledModel.from_config(transformers.GPT2Config(), sequence_parallell=True)
