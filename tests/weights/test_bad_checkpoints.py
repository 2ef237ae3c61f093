"""Checkpoints that do not fit raise one readable error on every rank; old or headless ones load.

What is accepted bounds what is not: old layouts of the Hub, and files that lack a whole head.
"""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from parity import batch_of, checkpoint
from refusals import BERT, GPT2, attempt, refused
from slapo_zoo import (
    AutoScheduledModel,
    SlapoError,
    WeightsError,
)


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {"gpt2": checkpoint(GPT2, root), "bert": checkpoint(BERT, root)}


@pytest.fixture
def folders(sources, tmp_path):
    """Return copies of the checkpoints that a test may change."""
    return {name: shutil.copytree(path, tmp_path / name) for name, path in sources.items()}


def rewrite(folder, change):
    """Apply `change` to the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = change(dict(tensors)) or tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {"format": "pt"})


def logits_of(cls, folder, batch, **options):
    model = getattr(transformers, cls).from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(**batch).logits


# --- keys and shapes ----------------------------------------------------------------------------

BLOCK = {"gpt2": "transformer.h.1.", "bert": "bert.encoder.layer.1."}
PART = {"gpt2": "h.1.mlp.c_fc.bias", "bert": "bert.encoder.layer.1.output.dense.bias"}


def full_name(name, keys):
    return next(key for key in keys if key.endswith(PART[name]))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_checkpoint_with_missing_keys_is_refused_and_names_them(name, folders, ranks):
    """First a part of a block is missing, then a block: neither is a head that may be initialised."""
    key = full_name(name, load_file(folders[name] / "model.safetensors"))
    rewrite(folders[name], lambda t: {k: v for k, v in t.items() if k != key})
    text = refused(WeightsError, folders[name], ranks, 2, tp=2)
    assert f"missing: {key}" in text
    assert "1 missing and 0 unexpected" in text
    rewrite(folders[name], lambda t: {k: v for k, v in t.items() if BLOCK[name] not in k})
    text = refused(WeightsError, folders[name], ranks, 2, pp=2)
    assert f"missing: {BLOCK[name]}" in text
    assert str(folders[name]) in text


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_checkpoint_with_unexpected_keys_is_refused_and_names_them(name, folders):
    """The file has a block too many, or an unknown tensor in a block."""
    extra = {k.replace(".1.", ".3.", 1) for k in load_file(folders[name] / "model.safetensors") if BLOCK[name] in k}  # fmt: skip
    rewrite(folders[name], lambda t: t | {k.replace(".1.", ".3.", 1): v.clone() for k, v in t.items() if BLOCK[name] in k})  # fmt: skip
    text = refused(WeightsError, folders[name])
    # GPT-2's own list of keys that may stay has "attn.bias", a pattern that c_attn.bias matches.
    assert f"0 missing and {len(extra) - (name == 'gpt2')} unexpected" in text
    assert "unexpected: " + min(k for k in extra if "c_attn.bias" not in k) in text
    odd = BLOCK[name] + "gate.weight"
    rewrite(folders[name], lambda t: {k: v for k, v in t.items() if k not in extra} | {odd: torch.ones(2)})  # fmt: skip
    assert f"unexpected: {odd}" in refused(WeightsError, folders[name])


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("gpt2", {"vocab_size": 120}, "found shape [99, 30], expected [120, 30]"),
        ("gpt2", {"n_positions": 32}, "found shape [16, 30], expected [32, 30]"),
        ("bert", {"intermediate_size": 80}, "found shape [70, 30], expected [80, 30]"),
    ],
)
def test_checkpoint_with_wrong_shapes_is_refused_and_names_the_keys(
    name, changes, shape, sources, ranks
):
    text = refused(WeightsError, sources[name], ranks, 2, tp=2, **changes)
    assert shape in text
    assert "tensors do not fit the model" in text
    assert "of this architecture, size and vocabulary" in text


def test_checkpoint_of_another_model_type_is_refused(sources, folders):
    shutil.copy(sources["bert"] / "model.safetensors", folders["gpt2"] / "model.safetensors")
    text = refused(WeightsError, folders["gpt2"])
    assert "missing" in text


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -4096])
def test_truncated_safetensors_file_is_refused(keep, folders, ranks):
    path = folders["gpt2"] / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    parts = ranks.run(attempt, 2, folders["gpt2"], {"tp": 2})
    assert [p[0] for p in parts] == [WeightsError] * 2
    assert all(str(path) in p[1] for p in parts)
    assert all("found" in p[3] for p in parts)


def test_keys_with_the_prefix_of_a_wrapper_are_shown_beside_the_missing_ones(folders):
    path = folders["gpt2"] / "model.safetensors"
    save_file({f"_orig_mod.{k}": v for k, v in load_file(path).items()}, path)
    text = refused(WeightsError, folders["gpt2"])
    assert "found instead: _orig_mod." in text
    assert "save the state dict of the inner model" in text


def test_text_file_with_a_safetensors_name_is_refused(folders):
    path = folders["gpt2"] / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert attempt(folders["gpt2"], {})[0] is WeightsError


def test_pickle_checkpoint_is_refused_unless_the_user_allows_pickle(folders, ranks):
    folder = folders["gpt2"]
    want = logits_of("GPT2LMHeadModel", folder, batch_of(GPT2))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = ranks.run(attempt, 2, folder, {"tp": 2})
    for kind, where, _, problem, hint in found:
        assert kind is WeightsError
        assert where == str(folder / "pytorch_model.bin")
        assert problem == "found a pickle, expected safetensors"
        assert "allow_pickle=True" in hint
    logits = ranks.run(forward, 2, folder, batch_of(GPT2), {"tp": 2, "allow_pickle": True})
    for ours in logits:
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def forward(folder, batch, options):
    return AutoScheduledModel.from_pretrained(folder, **options)(**batch).logits.detach()


def test_checkpoint_index_with_a_missing_file_is_refused(folders, ranks):
    model = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    (folders["gpt2"] / "model.safetensors").unlink()
    model.save_pretrained(folders["gpt2"], max_shard_size="30KB")
    files = sorted(folders["gpt2"].glob("model-*.safetensors"))
    assert len(files) > 2
    assert attempt(folders["gpt2"], {}) is None
    files[1].unlink()
    text = refused(WeightsError, folders["gpt2"], ranks, 2, pp=2)
    assert "model.safetensors.index.json" in text
    assert files[1].name in text
    assert "it is not there" in text
    assert "fetch the missing file" in text


def test_empty_checkpoint_folder_is_refused(folders):
    (folders["gpt2"] / "model.safetensors").unlink()
    text = attempt(folders["gpt2"], {})
    assert text[0] is WeightsError
    assert "expected model.safetensors" in text[3]
    assert text[4]


# --- checkpoints that lack a head ---------------------------------------------------------------


def new_tensors(folder, options):
    model = AutoScheduledModel.from_pretrained(folder, **options)
    full = model.consolidated_state_dict()
    return model.ledger.newly_initialized, model.ledger.unexpected, full


NEW_HEADS = {
    "BertForSequenceClassification": ("bert", ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]),
    "BertForQuestionAnswering": ("bert", ["qa_outputs.weight", "qa_outputs.bias"]),
    "BertForPreTraining": ("bert", ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias"]),
    "GPT2ForSequenceClassification": ("gpt2", ["score.weight"]),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cls", NEW_HEADS)
def test_head_that_a_checkpoint_lacks_is_initialized_equally_on_every_layout(cls, sources, threads):
    name, new = NEW_HEADS[cls]
    layouts = [(1, 1), (2, 1), (1, 2), (2, 2)]
    fulls = []
    for tp, pp in layouts:
        options = {"tp": tp, "pp": pp, "auto_class": cls, "seed": 3}
        results = threads.run(new_tensors, tp * pp, sources[name], options)
        for found, unexpected, _ in results:
            assert sorted(found) == sorted(new)  # reported on every rank
            assert all(key.startswith("cls.") for key in unexpected)
        fulls.append(results[0][2])
    source = load_file(sources[name] / "model.safetensors")
    for full in fulls:
        assert full.keys() == fulls[0].keys()
        assert all(torch.equal(full[key], fulls[0][key]) for key in full)
    assert all(torch.equal(fulls[0][key], source[key]) for key in fulls[0].keys() - {*new})
    (other,) = threads.run(new_tensors, 1, sources[name], {"auto_class": cls, "seed": 4})
    weights = [key for key in new if key.endswith("weight")]
    assert weights
    for key in weights:
        assert 0 < float(fulls[0][key].std()) < 1
        assert not torch.equal(fulls[0][key], other[2][key])  # the seed decides


# --- old layouts of the Hub ---------------------------------------------------------------------


def old_gpt2(tensors):
    """Return tensors as in gpt2 on the Hub: no prefix, causal masks in the file, no head."""
    old = {k.removeprefix("transformer."): v for k, v in tensors.items() if k != "lm_head.weight"}
    for i in range(3):
        old[f"h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        old[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return old


def old_bert(tensors):
    """Return tensors as in bert-base-uncased on the Hub: gamma and beta, position ids, the bias of the head."""
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }  # fmt: skip
    old["bert.embeddings.position_ids"] = torch.arange(20)[None]
    old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.ones(2, 30), torch.ones(2)  # fmt: skip
    return old


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("case", "old"), [(GPT2, old_gpt2), (BERT, old_bert)], ids=["gpt2", "bert"]
)
def test_checkpoint_with_old_key_names_loads_with_the_logits_of_transformers(
    case, old, tp, pp, folders, threads
):
    name = "gpt2" if case is GPT2 else "bert"
    folder, batch = folders[name], batch_of(case)
    want, source = logits_of(case.cls, folder, batch), load_file(folder / "model.safetensors")
    rewrite(folder, old)
    assert any(".gamma" in key or key.startswith("h.0.attn.bias") for key in load_file(folder / "model.safetensors"))  # fmt: skip
    for logits, new, full in threads.run(old_forward, tp * pp, folder, batch, tp, pp):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        assert new == []
        assert all(torch.equal(full[key], source[key]) for key in full)


def old_forward(folder, batch, tp, pp):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp)
    logits = model(**batch).logits.detach()
    return logits, model.ledger.newly_initialized, model.consolidated_state_dict()


# --- two values for one tied tensor --------------------------------------------------------------


def with_own_head(tensors):
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] * 0.5
    return tensors


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=["one", "tp2", "pp2"])
def test_checkpoint_whose_tied_head_differs_from_its_embedding_is_refused(layout, folders, ranks):
    """The file is refused; with tie_word_embeddings=False it loads as in plain transformers."""
    folder, batch, n = folders["gpt2"], batch_of(GPT2), 2 if layout else 1
    rewrite(folder, with_own_head)
    text = refused(SlapoError, folder, ranks, n, **layout)  # rank 0's error on all ranks
    assert "lm_head.weight" in text
    assert "transformer.wte.weight" in text
    untie = {**layout, "tie_word_embeddings": False}
    want = logits_of(GPT2.cls, folder, batch, tie_word_embeddings=False)
    for logits in ranks.run(forward, n, folder, batch, untie):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_checkpoint_with_a_tied_tensor_stored_twice_loads_with_the_logits_of_transformers(folders):
    batch = batch_of(GPT2)
    want = logits_of(GPT2.cls, folders["gpt2"], batch)
    rewrite(folders["gpt2"], lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"].clone()})
    torch.testing.assert_close(forward(folders["gpt2"], batch, {}), want, rtol=1e-4, atol=1e-4)


def saved_again(folder, out, layout):
    AutoScheduledModel.from_pretrained(folder, **layout).save_pretrained(out)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_checkpoint_with_old_key_names_is_saved_under_the_same_names(
    layout, folders, tmp_path, ranks
):
    folder, plain, mine = folders["bert"], tmp_path / "plain", tmp_path / "mine"
    rewrite(folder, lambda t: {k: v for k, v in old_bert(t).items() if "seq_rel" not in k})
    transformers.BertForMaskedLM.from_pretrained(folder).save_pretrained(plain)
    ranks.run(saved_again, 2, folder, mine, layout)
    want, found = (load_file(path / "model.safetensors") for path in (plain, mine))
    assert any(key.endswith("LayerNorm.gamma") for key in want)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)
