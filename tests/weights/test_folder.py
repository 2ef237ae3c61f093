"""Folders: one file, many files, hostile indexes, the Hub cache, pickles."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.folder import open_checkpoint

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def two_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / A)
    save_file({"b": torch.zeros(3, 1).half()}, tmp_path / B)
    write_index(tmp_path, {"a": A, "b": B})
    return tmp_path


def test_checkpoint_reader_opens_only_the_weight_files_that_are_needed(two_files):
    with open_checkpoint(two_files) as folder:
        assert folder.key_to_file == {"a": A, "b": B}
        assert len(folder.saves()) == 0
        assert folder.shape("b") == (3, 1)
        assert folder.dtype("b") == torch.float16
        assert torch.equal(folder.view("b"), torch.zeros(3, 1).half())
        assert len(folder.saves()) == 1
        with pytest.raises(WeightsError, match="no such key"):
            folder.view("c")


def test_single_weight_file_takes_precedence_over_an_index(two_files):
    save_file({"a": torch.full((2,), 5.0)}, two_files / "model.safetensors")
    with open_checkpoint(two_files) as folder:
        assert folder.view("a").tolist() == [5, 5]
        assert len(folder.saves()) == 1


def test_weight_files_that_the_index_places_in_a_subfolder_are_read(tmp_path):
    (tmp_path / "part").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "part" / A)
    write_index(tmp_path, {"a": f"part/{A}"})
    with open_checkpoint(tmp_path) as folder:
        assert folder.view("a").tolist() == [1, 1]


def test_weight_file_listed_in_the_index_but_absent_is_refused(two_files):
    (two_files / B).unlink()
    with pytest.raises(WeightsError, match=rf"{B}.* 1 tensors in this file, but it is not there"):
        open_checkpoint(two_files)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/../../x", "C:x", "..\\x", "", "x\0y"],
)
def test_weight_index_that_names_files_outside_the_folder_is_refused(two_files, name):
    write_index(two_files, {"a": name})
    with pytest.raises(WeightsError, match="expected a name inside the folder"):
        open_checkpoint(two_files)


def test_symlinks_out_of_the_checkpoint_folder_are_refused(tmp_path):
    (tmp_path / "inside").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "inside" / A).symlink_to(tmp_path / "outside.safetensors")
    write_index(tmp_path / "inside", {"a": A})
    with pytest.raises(WeightsError, match="found a link to"):
        open_checkpoint(tmp_path / "inside")
    os.rename(tmp_path / "inside" / A, tmp_path / "inside" / "model.safetensors")
    with pytest.raises(WeightsError, match="found a link to"):
        open_checkpoint(tmp_path / "inside")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", A])
def test_checkpoint_with_circular_symlinks_is_refused(two_files, name):
    (two_files / name).unlink(missing_ok=True)
    (two_files / name).symlink_to("circle")
    (two_files / "circle").symlink_to(name)
    with pytest.raises(WeightsError, match=r"cannot be opened|not there"):
        open_checkpoint(two_files)
    with pytest.raises(WeightsError, match="no such folder"):
        open_checkpoint(two_files / "circle")


def test_checkpoint_symlinks_within_the_hub_cache_are_followed(tmp_path):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    save_file({"a": torch.ones(2)}, repo / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    with open_checkpoint(snapshot) as folder:
        assert folder.view("a").tolist() == [1, 1]
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "models--other" / "blobs").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "models--other" / "blobs" / "1")
    (snapshot / "model.safetensors").symlink_to("../../../models--other/blobs/1")
    with pytest.raises(WeightsError, match="found a link to"):
        open_checkpoint(snapshot)


def test_named_pipe_in_a_checkpoint_folder_is_refused_without_hanging(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="this is not a regular file"):
        open_checkpoint(tmp_path)


def test_weight_index_that_disagrees_with_the_tensors_in_its_files_is_refused(two_files):
    write_index(two_files, {"a": A, "b": B, "c": B})
    folder = open_checkpoint(two_files)
    with pytest.raises(WeightsError, match=r"'c'.*which does not hold it"):
        folder.view("b")
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, two_files / B)
    write_index(two_files, {"a": A, "b": B})
    with (
        open_checkpoint(two_files) as folder,
        pytest.raises(WeightsError, match=r"'a'.*in another one"),
    ):
        folder.view("b")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a file name for every key"),
        ('{"weight_map": {}}', "expected a file name for every key"),
        ('{"weight_map": {"a": 1}}', "expected a file name for every key"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "expected one file"),
    ],
)
def test_malformed_weight_index_json_is_refused(tmp_path, text, problem):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=problem):
        open_checkpoint(tmp_path)


def test_checkpoint_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "README.md").touch()
    with pytest.raises(WeightsError, match=r"found README.md; expected model.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="no such folder"):
        open_checkpoint(tmp_path / "none")


def test_weight_file_truncated_while_read_raises(two_files):
    """Reading beyond the end of a mapped file would kill the process without a message."""
    with open_checkpoint(two_files) as folder:
        folder.view("a")
        os.truncate(two_files / A, (two_files / A).stat().st_size - 1)
        with pytest.raises(WeightsError, match="truncated after it had been opened"):
            folder.view("a")


@pytest.mark.parametrize("new_format", [True, False])
def test_pickle_weight_file_is_refused_unless_allowed(tmp_path, new_format):
    state = {"a": torch.randn(3, 2), "b": torch.nn.Parameter(torch.ones(2))}
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(WeightsError, match="allow_pickle"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, allow_pickle=True) as folder:
        assert torch.equal(folder.view("a"), state["a"])
        assert folder.shape("a") == (3, 2)
        assert not folder.view("b").requires_grad


def test_pickle_checkpoint_with_an_index_loads_only_with_allow_pickle(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    text = json.dumps({"weight_map": {"a": "x.bin"}})
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with open_checkpoint(tmp_path) as folder, pytest.raises(WeightsError, match="allow_pickle"):
        folder.view("a")
    with open_checkpoint(tmp_path, allow_pickle=True) as folder:
        assert folder.view("a").item() == 1


class Evil:
    def __reduce__(self):
        return print, ("this must never run",)


@pytest.mark.parametrize("state", [{"a": Evil()}, {"a": 3}, [torch.ones(1)]])
def test_pickle_weight_file_that_holds_more_than_tensors_is_refused(tmp_path, capsys, state):
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="found"):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert capsys.readouterr().out == ""


def test_malformed_pickle_weight_file_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(WeightsError, match="no plain state dict"):
        open_checkpoint(tmp_path, allow_pickle=True)
