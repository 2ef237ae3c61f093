"""Files of a saved folder beside the weights; files that hold nothing but NaN, or cannot be read."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from slapo_zoo import AutoScheduledModel, RankError, SlapoError
from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.safetensors_file import SafetensorsFile


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a folder with a tokenizer, a generation config, and other files."""
    path = tmp_path_factory.mktemp("source")
    config = GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=64)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    for name in (
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
        "spm.model",
        "notes.md",
    ):
        (path / name).write_text("{}")
    return path


def resave(source, out, size):
    model = AutoScheduledModel.from_pretrained(source, tp=2)
    model.save_pretrained(out, max_shard_size=size)


def test_save_writes_configs_and_tokenizer_and_obeys_max_shard_size(ranks, source, tmp_path):
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    ranks.run(resave, 2, source, out, "30KB")
    config = GPT2Config.from_pretrained(source)  # a loaded one would be packed in the files' order
    GPT2LMHeadModel(config).save_pretrained(theirs, max_shard_size="30KB")
    carried = {
        "checksums.json",
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
        "spm.model",  # of DeBERTa
    }
    assert {p.name for p in out.iterdir()} == {p.name for p in theirs.iterdir()} | carried
    index = "model.safetensors.index.json"
    assert json.loads((out / index).read_text()) == json.loads((theirs / index).read_text())
    sizes = [sum(t.nbytes for t in load_file(p).values()) for p in out.glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) <= 30_000
    again = AutoModelForCausalLM.from_pretrained(out)
    assert again.generation_config.temperature == 0.7


def test_save_does_not_overwrite_an_existing_tokenizer_in_the_target_folder(
    ranks, source, tmp_path
):
    shutil.copytree(source, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text('{"mine": 1}')
    ranks.run(resave, 2, source, tmp_path / "out", "5GB")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"mine": 1}'
    assert (tmp_path / "out" / "notes.md").exists()


def test_model_loaded_from_a_relative_folder_is_saved_with_its_tokenizer_from_another_directory(
    source, tmp_path, monkeypatch
):
    monkeypatch.chdir(source.parent)
    model = AutoScheduledModel.from_pretrained(source.name)
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("out")
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_folder_that_a_killed_save_moved_away_is_loaded_again(source, tmp_path):
    """A file system without renameat2: the save was killed between its two renames."""
    shutil.copytree(source, tmp_path / ".out.previous-0123abcd")
    AutoScheduledModel.from_pretrained(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_save_into_a_folder_with_a_tokenizer_succeeds_and_with_unrelated_files_is_refused(
    source, tmp_path
):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"mine": 1}')
    AutoScheduledModel.from_pretrained(source).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"mine": 1}
    assert (tmp_path / "model.safetensors").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    with pytest.raises(WeightsError, match=r"no checkpoint of this kind \(thesis.txt\)"):
        AutoScheduledModel.from_pretrained(source).save_pretrained(other)


def test_generation_fields_of_an_old_config_are_loaded_and_a_broken_generation_config_is_refused(
    source, tmp_path
):
    folder = shutil.copytree(source, tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_length": 9, "num_beams": 3}))
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"generation_config\.json: no generation config"):
        AutoScheduledModel.from_pretrained(folder)
    (folder / "generation_config.json").unlink()
    found, plain = (
        kind.from_pretrained(folder).generation_config.to_dict()
        for kind in (AutoScheduledModel, AutoModelForCausalLM)
    )
    assert found == plain
    assert found["num_beams"] == 3


def test_checkpoint_with_only_nan_values_loads_without_warning(source, tmp_path, recwarn):
    folder = shutil.copytree(source, tmp_path / "nan")
    full = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.full_like(t, torch.nan) for name, t in full.items()},
        folder / "model.safetensors",
    )
    model = AutoScheduledModel.from_pretrained(folder)
    assert not recwarn.list
    assert all(p.isnan().all() for p in model.parameters())
    with pytest.warns(UserWarning, match=rf"{len(full)} of {len(full)} tensors hold NaN"):
        AutoScheduledModel.from_pretrained(folder, check_finite=True)


def half_way(source):
    """Let the read of rank 1's fifth tensor fail."""
    count, view = 0, SafetensorsFile.view

    def failing(self, name):
        nonlocal count
        count += 1
        if count == 5 and dist.get_rank() == 1:
            raise WeightsError(str(self.path), name, "cannot be read: Input/output error")
        return view(self, name)

    SafetensorsFile.view = failing
    try:
        AutoScheduledModel.from_pretrained(source, tp=2)
    except SlapoError as error:
        return type(error), str(error)
    finally:
        SafetensorsFile.view = view
    return None, ""


def test_save_whose_file_read_fails_on_one_rank_raises_on_all_ranks(ranks, source):
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    kinds, texts = zip(*ranks.run(half_way, 2, source), strict=True)
    assert kinds == (RankError, WeightsError)
    assert all("Input/output error" in text for text in texts)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
